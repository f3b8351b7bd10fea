"""Text ↔ token ids, streaming decode and chat templates.

Knows: the `tokenizers` package, tokenizer.json with its companions, and templates in a jinja2 sandbox.
Does not know: GGUF (checkpoint/gguf_vocabulary.py builds a Tokenizer from one), HTTP, or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from jspark.errors import UserError

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A tokenizer with its special tokens and, where the checkpoint has one, its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        origin: str,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """`special_tokens`: role ("bos_token", "eos_token", …) → text, as templates see them."""
        self.backend = backend
        self.origin = origin
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's own vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self.chat_template is not None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the end token that the tokenizer itself names; () when it names none."""
        token = self.special_tokens.get("eos_token")
        index = self.backend.token_to_id(token) if token is not None else None
        return () if index is None else (index,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written in the text are recognised.

        `add_special_tokens` adds what the tokenizer's own settings ask for, such as a BOS token. Pass False
        for the result of `apply_chat_template`, which writes its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for one growing sequence."""
        return StreamDecoder(self.backend, skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt that the checkpoint's template makes of `messages` ({"role": …, "content": …}).

        `variables` are further names for the template (tools, enable_thinking, …). Raises UserError when
        there is no template, when it is broken, or when it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(
                f"{self.origin} has no chat template; send a plain prompt, or add a chat_template.jinja"
            )
        try:
            return self._template.render(
                **self.special_tokens,
                **{"tools": None, "documents": None, **variables},
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
            )
        except UserError:
            raise
        except Exception as e:  # a template can raise anything that its expressions can
            raise UserError(
                f"the chat template of {self.origin} failed on these messages ({type(e).__name__}: {e}); "
                "check their roles and content"
            ) from None

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse_messages
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template or "")
        except jinja2.TemplateSyntaxError as e:
            raise UserError(
                f"the chat template of {self.origin} has a syntax error in line {e.lineno} ({e.message}); "
                "correct it"
            ) from None


class StreamDecoder:
    """Text of one sequence as its tokens arrive; no character is handed out before its last byte."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool = True):
        self._backend = backend
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        self._pending.append(token)
        text = self._stream.step(self._backend, token)
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left at the end: unfinished bytes as U+FFFD."""
        text = self._backend.decode(self._pending, skip_special_tokens=self._skip)
        self._pending.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text


def from_folder(folder: Path) -> Tokenizer | str:
    """The tokenizer of a Hugging Face folder, or the reason why there is none; UserError for broken files."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return f"{folder} has no tokenizer.json, so text cannot be used; pass token ids, or add that file"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the package raises bare Exception
        raise UserError(f"{path} cannot be read as a tokenizer ({e}); fetch it again") from None
    backend.no_truncation()
    backend.no_padding()
    settings = _read_settings(folder / "tokenizer_config.json")
    special = {}
    for role, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            special[role] = text
    return Tokenizer(
        backend,
        origin=str(folder),
        chat_template=_folder_template(folder, settings),
        special_tokens=special,
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{own} cannot be read ({e}); fetch it again") from None
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({e}); fetch it again") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a JSON {type(data).__name__}, not an object; fetch it again")
    return data


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks text to train on; here it is its content."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse_messages(message: str) -> None:
    raise UserError(f"the chat template refuses these messages: {message}")
