"""Single tokens as text and bytes, and log-probabilities in the words of the three APIs.

Knows: how tokenizers hide spaces and halves of characters. Does not know: answers or requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jspark.request import TokenLogprob

if TYPE_CHECKING:
    from jspark.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"


class TokenTexts:
    """Texts of single tokens, as they stand in the middle of a text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Some decoders strip the space before a text's first token, so each token is decoded behind another one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skip = len(tokenizer.decode(self._before, skip_special_tokens=False))
        self.text = lru_cache(1 << 17)(self._text)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([*self._before, token], skip_special_tokens=False)[self._skip :]

    def bytes(self, token: int) -> list[int]:
        """The token's bytes; of half a character too, where the vocabulary writes bytes."""
        text = self.text(token)
        if _UNKNOWN not in text:
            return list(text.encode())
        piece = self._tokenizer.backend.id_to_token(token) or ""
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return [int(match[1], 16)]
        alphabet = _byte_alphabet()
        if all(c in alphabet for c in piece):
            return [alphabet[c] for c in piece]
        return list(text.encode())

    # ── in the words of the APIs ──────────────────────────────────────────────────────────────────────────────

    def chat(self, entries: Iterable[TokenLogprob], top: int) -> dict[str, Any]:
        """`logprobs` of a chat's choice."""

        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.text(token), "logprob": _finite(logprob), "bytes": self.bytes(token)}

        content = [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(*pair) for pair in e.top[:top]]} for e in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Iterable[TokenLogprob | None], ids: Iterable[int], start: int, top: int) -> Any:
        """`logprobs` of a completion's choice; start: where its text begins. None is a token nothing predicts."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry, token in zip(entries, ids, strict=True):
            text = self.text(token)
            tokens.append(text)
            offsets.append(start)
            start += len(text)
            logprobs.append(None if entry is None else _finite(entry.logprob))
            best: dict[str, float] | None = None
            if entry is not None:
                best = {}
                for other, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
                    best.setdefault(self.text(other), _finite(logprob))
            tops.append(best)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def prompt(self, entries: Iterable[TokenLogprob | None], top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`."""
        found: list[dict[str, Any] | None] = []
        for entry in entries:
            if entry is None:
                found.append(None)
                continue
            ranked = {t: (r, p) for r, (t, p) in enumerate(entry.top[:top], 1)}
            ranked.setdefault(entry.token_id, (None, entry.logprob))  # type: ignore[arg-type]
            found.append(
                {
                    str(t): {"logprob": _finite(p), "rank": r, "decoded_token": self.text(t)}
                    for t, (r, p) in ranked.items()
                }
            )
        return found

    def triples(self, pairs: Iterable[tuple[int, float | None]], with_text: bool) -> list[list[Any]]:
        """SGLang's [log-probability, id, text]."""
        return [
            [None if p is None else _finite(p), token, self.text(token) if with_text else None]
            for token, p in pairs
        ]


def _finite(logprob: float) -> float:
    """JSON has no −∞; −9999 is what the OpenAI API writes."""
    return max(logprob, -9999.0)


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
