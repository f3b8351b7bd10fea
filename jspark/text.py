"""Text of one answer as its tokens arrive: incremental decoding and stop strings.

Knows: text, and what of it may be shown already. Does not know: requests, sampling, or who reads the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from jspark.tokenizer import StreamDecoder


class TextStream:
    """Pushes tokens in and hands out text that no later token can take back.

    Text is held back while a character is unfinished, or while it may be the beginning of a stop string. Once a
    stop string is complete `stop_string` names it; the text ends before it and later tokens are not for this
    stream. The text of the first `minimum` tokens is not searched.
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = (), minimum: int = 0):
        self.stop_string: str | None = None
        self._unsearched = minimum
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that `token` sets free."""
        if self._unsearched:
            self._unsearched -= 1
            return self._decoder.push(token)
        return self._release(self._decoder.push(token))

    def finish(self) -> str:
        """What was held back, at the end of the answer; bytes of an unfinished character become U+FFFD."""
        text = self._release(self._decoder.flush())
        if self.stop_string is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if not (new and self._stop):
            return new
        text = self._held + new
        found = [(text.find(s), s) for s in self._stop if s in text]
        if found:
            at, self.stop_string = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
