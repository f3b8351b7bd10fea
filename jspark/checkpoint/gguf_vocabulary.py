"""The vocabulary in GGUF metadata → Tokenizer.

Knows: byte-level BPE ("gpt2") with the pre-tokenisers of SmolLM, Llama 3, Qwen 2 and 3 and GPT-2, and
llama.cpp's default where a file names none. Does not know: the container or how text is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from jspark.chat_template import DEFAULT
from jspark.errors import UserError
from jspark.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
#: Pre-tokeniser → the expressions that cut the text, one after the other.
_SPLITS = {
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"),),
    "gpt-2": (_GPT2_SPLIT,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


def tokenizer(metadata: Mapping[str, Any], origin: str) -> Tokenizer | str:
    """The tokenizer, or the reason why there is none; UserError when its parts contradict each other."""
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return f"{origin} holds no vocabulary, so text cannot be used with it; pass token ids"
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _SPLITS:
        return (
            f"{origin} has a tokenizer of the kind {model!r} with the pre-tokeniser {pre!r}, "
            "which cannot be used; pass token ids, or use the safetensors checkpoint of this model"
        )
    tokens, merges = _strings(metadata, "tokens", origin), _strings(metadata, "merges", origin)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise _contradiction(origin, "its tokens are not distinct or not as many as their types")
    backend = _backend(vocabulary, merges, pre, origin)
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == _CONTROL
        ]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    )
    bos, eos = (_token(metadata, key, tokens, origin) for key in ("bos_token_id", "eos_token_id"))
    before = bos if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") else None
    after = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if before or after:
        parts = [part for part in (before, "$A", after) if part]
        ends = {token: vocabulary[token] for token in (before, after) if token}
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(ends.items()))
    return Tokenizer(
        backend,
        origin=origin,
        chat_template=templates(metadata),
        special_tokens={k: v for k, v in {"bos_token": bos, "eos_token": eos}.items() if v is not None},
    )


def templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """By name: the plain one under its own key, others under keys that end in their names."""
    key = "tokenizer.chat_template"
    named = {DEFAULT: metadata.get(key)}
    named |= {k.removeprefix(key + "."): v for k, v in metadata.items() if k.startswith(key + ".")}
    return {name: source for name, source in named.items() if isinstance(source, str)}


def _backend(vocabulary: dict[str, int], merges: list[str], pre: str, origin: str) -> tokenizers.Tokenizer:
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise _contradiction(origin, f"the merge {merge!r} is not two tokens")
        pairs.append((left, right))
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as e:  # the package raises bare Exception, for a merge outside the vocabulary
        raise _contradiction(origin, str(e)) from None
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = ByteLevelDecoder()
    return backend


def _strings(metadata: Mapping[str, Any], key: str, origin: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise _contradiction(origin, f"it has no list of {key}")
    return value


def _token(metadata: Mapping[str, Any], key: str, tokens: list[str], origin: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{key}")
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise _contradiction(origin, f"{key} is {index!r}, outside its {len(tokens)} tokens")
    return tokens[index]


def _contradiction(origin: str, what: str) -> UserError:
    return UserError(f"the vocabulary of {origin} cannot be used ({what}); fetch the file again")
