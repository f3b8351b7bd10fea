"""Answers as they grow: tokens and figures of the engine → text, deltas and the finished output.

Knows: text and stop strings by way of text.py, and what a user sees of a request. Does not know: who drives the
engine or waits for the answer (llm.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from jspark.request import FinishReason, Request, Stats, TokenLogprob, Update
from jspark.text import TextStream


@dataclass(frozen=True)
class Output:
    """The answer to one prompt.

    model: the name under which it is served. index: which of the prompt's `n` continuations. text: None without
    a tokenizer; what ended it (stop string, stop token) is not part of it. output_ids: new tokens only, up to the
    one that ended it. stop_reason: the stop string, the id of the stop token, or why an answer with a grammar
    broke off (finish_reason "abort"). steps: target forwards that committed tokens of this prompt after its
    prefill. accept_length: tokens after the first, per step; None without a step. window_histogram[n]: steps that
    sent n drafted tokens to verification; accepted_histogram[n]: steps that accepted n of them (both γ + 1 long).
    Seconds run from admission to the first token, and from there to the last; compilation on first use is inside
    them. cached_tokens: tokens of the prompt that the prefix cache held. utilisation: accepted drafts under the
    windows over those of whole blocks; None where only windows were verified (compact). logprobs: one entry a
    token of output_ids. prompt_logprobs: one a prompt token, None for the first, which nothing predicts. Both are
    None where not asked for.
    """

    model: str
    index: int
    text: str | None
    output_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    steps: int
    accept_length: float | None
    window_histogram: list[int]
    accepted_histogram: list[int]
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int = 0
    utilisation: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True)
class Delta:
    """News of an answer. text: "" while it is held back, and without a tokenizer. output: with the last delta.

    index, logprobs: see `Output`; the latter of `token_ids`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    output: Output | None = None


class Answer:
    """One request on its way to an Output.

    prompt, index: of which prompt of a call, and which continuation of it. limit: tokens it may have. echo: what
    its text begins with. whole_blocks: the engine verifies whole blocks.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream | None,
        block_size: int,
        limit: int,
        *,
        model: str,
        prompt: int,
        index: int,
        echo: str,
        whole_blocks: bool,
    ):
        self.request, self.limit, self.prompt, self.index = request, limit, prompt, index
        self.echo = echo
        self._whole_blocks = whole_blocks
        self.finish_reason: FinishReason | None = None
        self._text = text
        self._block_size = block_size
        self._model = model
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._pieces: list[str] = [echo]
        self._told_ids = self._told_pieces = 0
        self._stop_reason: str | int | None = None
        self._stats = Stats()

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """Of the prompt's tokens, as far as they were asked for and have come."""
        return [None, *self._prompt_logprobs]

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held, as far as is known."""
        return self._stats.cached_tokens

    def take(self, update: Update) -> None:
        """Adds a step's tokens, as far as they are part of the answer."""
        self._stats = update.stats
        self._prompt_logprobs += update.prompt_logprobs
        for i, token in enumerate(update.tokens):
            self._ids.append(token)
            self._logprobs += update.logprobs[i : i + 1]
            if token in self.request.stop_ids:
                self._stop_reason = token
            elif self._text and self._show(self._text, self._text.push(token)):
                return
        if update.finish_reason:
            self.finish_reason = update.finish_reason
            self._stop_reason = update.problem or self._stop_reason
            if self._text:
                self._show(self._text, self._text.finish())

    def _show(self, text: TextStream, piece: str) -> bool:
        """Whether a stop string ended the text with this piece."""
        self._pieces.append(piece)
        if text.stop_string is None:
            return False
        self.finish_reason, self._stop_reason = "stop", text.stop_string
        return True

    def delta(self) -> Delta:
        """What has come since the last call."""
        text, ids = "".join(self._pieces[self._told_pieces :]), self._ids[self._told_ids :]
        logprobs = None if self.request.params.logprobs is None else self._logprobs[self._told_ids :]
        self._told_pieces, self._told_ids = len(self._pieces), len(self._ids)
        output = self.output() if self.finish_reason else None
        return Delta(self.index, text, ids, self.finish_reason, logprobs, output)

    def output(self) -> Output:
        """The answer, of a sequence that has ended."""
        assert self.finish_reason is not None
        stats, count, params = self._stats, len(self._ids), self.request.params
        return Output(
            model=self._model,
            index=self.index,
            text="".join(self._pieces) if self._text else None,
            output_ids=self._ids,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=count,
            steps=stats.steps,
            accept_length=(count - 1) / stats.steps if stats.steps else None,
            window_histogram=[stats.windows[n] for n in range(self._block_size + 1)],
            accepted_histogram=[stats.accepted[n] for n in range(self._block_size + 1)],
            prefill_seconds=stats.prefill_seconds,
            decode_seconds=stats.decode_seconds,
            cached_tokens=self.cached_tokens,
            utilisation=stats.utilisation if self._whole_blocks else None,
            logprobs=None if params.logprobs is None else self._logprobs,
            prompt_logprobs=None if params.prompt_logprobs is None else self.prompt_logprobs,
        )
