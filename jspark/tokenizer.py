"""Text ↔ token ids, streaming decode, and which chat templates a folder has.

Knows: the `tokenizers` package, and tokenizer.json with its companions.
Does not know: GGUF (checkpoint/gguf_vocabulary.py builds a Tokenizer from one), how templates are rendered
(chat_template.py), HTTP, or the engine.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from jspark.chat_template import DEFAULT, ChatTemplate, read_template
from jspark.errors import UserError
from jspark.files import read_file, read_json

#: Bytes; several times the largest known.
_MAX_TOKENIZER = 128 << 20
_MAX_SETTINGS = 8 << 20
_MAX_GROWTH = 16


class Tokenizer:
    """A tokenizer with its special tokens and, where the checkpoint has one, its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        origin: str,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """`chat_template`: one, or several by name ("default", "tool_use").

        `special_tokens`: role ("bos_token", "eos_token", …) → text, as templates see them.
        """
        self.backend = backend
        self.origin = origin
        self.special_tokens = dict(special_tokens or {})
        named = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template
        self.chat_template = ChatTemplate(named, origin, self.special_tokens) if named else None

    def with_chat_template(self, source: str, origin: str) -> Tokenizer:
        """The same tokenizer with a template from elsewhere."""
        other = Tokenizer(self.backend, origin=self.origin, special_tokens=self.special_tokens)
        other.chat_template = ChatTemplate({DEFAULT: source}, origin, self.special_tokens)
        return other

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
        with _panics_told(self.origin):
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary are left out."""
        with _panics_told(self.origin):
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for one growing sequence."""
        return StreamDecoder(self.backend, skip_special_tokens, self.origin)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt that the checkpoint's template makes of `messages`; see `ChatTemplate.render`.

        Raises UserError also when there is no template.
        """
        if self.chat_template is None:
            raise UserError(
                f"{self.origin} has no chat template; send a plain prompt, or pass one with --chat-template"
            )
        return self.chat_template.render(messages, tools, add_generation_prompt, **variables)


class StreamDecoder:
    """Text of one sequence as its tokens arrive; no character is handed out before its last byte."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool, origin: str):
        self._backend = backend
        self._origin = origin
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        self._pending.append(token)
        with _panics_told(self._origin):
            text = self._stream.step(self._backend, token)
        if text is None:
            return ""
        self._pending.clear()
        return text

    def flush(self) -> str:
        """What is left at the end: unfinished bytes as U+FFFD."""
        with _panics_told(self._origin):
            text = self._backend.decode(self._pending, skip_special_tokens=self._skip)
        self._pending.clear()
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text


def from_folder(folder: Path) -> Tokenizer | str:
    """The tokenizer of a Hugging Face folder, or the reason why there is none; UserError for broken files."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return f"{folder} has no tokenizer.json, so text cannot be used; pass token ids, or add that file"
    try:
        backend = tokenizers.Tokenizer.from_buffer(read_file(path, _MAX_TOKENIZER))
        backend.no_truncation()
        backend.no_padding()
    except BaseException as e:  # the package raises bare Exception, and a panic is not even that
        if not (isinstance(e, Exception) or _is_panic(e)):
            raise
        raise UserError(f"{path} cannot be read as a tokenizer ({e}); fetch it again") from None
    _check_growth(backend, str(path))
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path, _MAX_SETTINGS) if settings_path.exists() else {}
    special = {}
    for role, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(text, str):
            special[role] = text
    return Tokenizer(
        backend,
        origin=str(folder),
        chat_template=_folder_templates(folder, settings),
        special_tokens=special,
    )


def _is_panic(error: BaseException) -> bool:
    """Whether it is a fault inside the package, which is written in Rust; such an error is no Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _panics_told(origin: str) -> Iterator[None]:
    """A panic as an error of the tokenizer: regular expressions of a file can exceed the package's bounds."""
    try:
        yield
    except BaseException as e:
        if not _is_panic(e):
            raise
        raise UserError(
            f"the tokenizer of {origin} fails on this text ({e}); use another tokenizer.json"
        ) from None


def _check_growth(backend: tokenizers.Tokenizer, path: str) -> None:
    """UserError for a tokenizer that makes texts many times longer: replacements in a row multiply."""
    for part in (backend.normalizer, backend.decoder, backend.post_processor):
        try:
            state = json.loads(part.__getstate__()) if part is not None else None
        except (TypeError, ValueError, RecursionError, AttributeError):
            state = None  # a part of Python's own making, which no file holds
        if _growth(state) > _MAX_GROWTH:
            raise UserError(
                f"{path} makes texts more than {_MAX_GROWTH} times longer than they are, which no real tokenizer "
                "does; fetch it again"
            )


def _growth(part: Any) -> float:
    """How many times longer a text can get in a normalizer, decoder or post-processor, and all within it."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1.0
    match part.get("type"):
        case "Replace":
            pattern = part["pattern"].get("String") or "x"  # an expression can match one character, or none
            return max(1.0, len(part["content"].encode()) / len(pattern.encode()))
        case "TemplateProcessing":
            return max(1.0, sum("Sequence" in piece for piece in part["single"]))
    return math.prod(_growth(value) for value in part.values() if isinstance(value, list))


def _folder_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name. Files of their own come before tokenizer_config.json, as in transformers."""
    own = {f.stem: f for f in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        own[DEFAULT] = folder / "chat_template.jinja"
    if own:
        return {name: read_template(path) for name, path in own.items()}
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {DEFAULT: template}
    if isinstance(template, list):
        pairs = [(t.get("name"), t.get("template")) for t in template if isinstance(t, dict)]
    else:
        pairs = list(template.items()) if isinstance(template, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
