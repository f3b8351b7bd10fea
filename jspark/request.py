"""What is asked of the engine and what comes back, in token ids.

Knows: sampling parameters and their limits, the figures kept of each request.
Does not know: text (llm.py), slots or pages (engine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from jspark.errors import UserError
from jspark.structured import StructuredOutputs, structured

if TYPE_CHECKING:
    from jspark.grammar import Grammar

FinishReason = Literal["stop", "length", "abort"]
Sampler = Literal["auto", "coupled", "rejection"]
#: Tokens of an answer when nothing is said, where the context and the pool hold as many.
AUTO_TOKENS = 128
#: How many of the likeliest tokens a program returns, and so the most that a request can ask for.
LOGPROB_STEPS = (0, 5, 20)


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    n: continuations of the prompt, each as if asked for alone; number i has the seed (seed + i) mod 2⁶⁴.
    temperature: 0 is greedy. top_k: 0 or −1 is off. top_p: 1 is off. min_p: 0 is off. seed: makes the output a
    function of the prompt and the seed. max_tokens: None fills the context; auto is 128, or what fits. stop:
    strings that end the text and are cut from it. speculative_sampling: the coupled sampler gives exactly plain
    decoding's tokens for the seed, the rejection sampler its distribution; auto is coupled for requests with a
    seed. speculative: False drafts nothing for this request.

    These change the target's logits, in this order, before temperature and filters. repetition_penalty: divides
    positive logits and multiplies negative ones of tokens in prompt or output; 1 is off. frequency_penalty,
    presence_penalty: subtracted for each occurrence of a token in the output, or once; 0 is off. logit_bias:
    added, by token id. bad_words: texts, or lists of token ids, of which the last token cannot follow the ones
    before it, be these of the prompt or of the output; a text counts with and without a space before it.
    min_tokens: before so many tokens nothing that stops can come, and stop strings are not looked for.
    structured_outputs: what the answer must look like; tokens that would break it are impossible. Where nothing
    but the end may follow, the answer ends, whatever min_tokens and ignore_eos say.

    logprobs: with each token its log-probability under the target's plain softmax, and this many of the
    likeliest tokens; None: nothing. prompt_logprobs: the same of the prompt. echo: the text begins with the
    prompt. skip_special_tokens: leaves special tokens out of the text.

    Raises:
        UserError: a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | Literal["auto"] | None = "auto"
    min_tokens: int = 0
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: str | Iterable[str | Iterable[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    speculative: bool = True
    speculative_sampling: Sampler = "auto"

    def __post_init__(self) -> None:
        def refuse(name: str, allowed: str) -> None:
            raise UserError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")

        # NaN fails every comparison. The device computes in float32.
        if not (_real(self.temperature) and (self.temperature == 0 or 1e-30 <= self.temperature <= 1e30)):
            refuse("temperature", "0 (greedy) or a positive number from 1e-30 to 1e30")
        if not (_whole(self.top_k) and self.top_k >= -1):
            refuse("top_k", "a positive whole number, or 0 for no limit")
        if not (_real(self.top_p) and 0 < self.top_p <= 1):
            refuse("top_p", "above 0 and at most 1")
        if not (_real(self.min_p) and 0 <= self.min_p <= 1):
            refuse("min_p", "between 0 and 1")
        if self.seed is not None and not (_whole(self.seed) and -(2**63) <= self.seed < 2**64):
            refuse("seed", "a 64-bit integer")
        if self.max_tokens is not None and self.max_tokens != "auto":
            if not (_whole(self.max_tokens) and self.max_tokens >= 1):
                refuse("max_tokens", "a whole number of at least 1")
            object.__setattr__(self, "max_tokens", int(self.max_tokens))
        if not (_whole(self.min_tokens) and self.min_tokens >= 0):
            refuse("min_tokens", "a whole number of at least 0")
        if isinstance(self.max_tokens, int) and self.min_tokens > self.max_tokens:
            refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}")
        if not (_whole(self.n) and self.n >= 1):
            refuse("n", "a whole number of at least 1")
        if self.n > 1 and self.temperature == 0:
            refuse("n", "1 at temperature 0, where all continuations are the same")
        # Beyond these float32 overflows with the logits of real models, or nothing is left of them.
        if not (_real(self.repetition_penalty) and 1e-6 <= self.repetition_penalty <= 1e6):
            refuse("repetition_penalty", "a positive number from 1e-6 to 1e6; 1 is off")
        for name in ("frequency_penalty", "presence_penalty"):
            if not (_real(getattr(self, name)) and -2 <= getattr(self, name) <= 2):
                refuse(name, "between -2 and 2")
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(self, name)
            if k is not None and not (_whole(k) and 0 <= k <= LOGPROB_STEPS[-1]):
                refuse(name, f"how many of the likeliest tokens come back, 0 to {LOGPROB_STEPS[-1]}, or None")
        for name in ("ignore_eos", "echo", "skip_special_tokens", "speculative"):
            if not isinstance(getattr(self, name), bool):
                refuse(name, "True or False")
        if self.speculative_sampling not in get_args(Sampler):
            refuse("speculative_sampling", "auto, coupled or rejection")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not (isinstance(stop, Iterable) and all(isinstance(s, str) and s for s in stop)):
            refuse("stop", "non-empty strings")
        ids = self.stop_token_ids
        if not (isinstance(ids, Iterable) and all(_whole(t) and t >= 0 for t in ids)):
            refuse("stop_token_ids", "a list of token ids of 0 and more")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))
        bias = {} if self.logit_bias is None else self.logit_bias
        if not (
            isinstance(bias, Mapping)
            and all(_whole(t) and t >= 0 and _real(b) and -1e6 <= b <= 1e6 for t, b in bias.items())
        ):
            refuse("logit_bias", "a mapping of token ids to numbers from -1e6 to 1e6")
        object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in bias.items()})
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        words = tuple(map(_word, words)) if isinstance(words, Iterable) else (None,)
        if not all(words):
            refuse("bad_words", "non-empty texts or lists of token ids")
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "structured_outputs", structured(self.structured_outputs))

    @property
    def filtered(self) -> bool:
        """Any of top-k, top-p and min-p is in use."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalized(self) -> bool:
        """Any of the three penalties is in use."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def coupled(self) -> bool:
        """The coupled sampler is meant; greedy requests have none."""
        return self.speculative_sampling == "coupled" or (
            self.speculative_sampling == "auto" and self.seed is not None
        )

    def continuation(self, i: int) -> SamplingParams:
        """What number `i` of the `n` continuations is, asked for alone."""
        return replace(self, n=1, seed=None if self.seed is None else (self.seed + i) % 2**64)


def _word(value: Any) -> str | tuple[int, ...] | None:
    """A bad word as it is kept; None for what is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
        ids = tuple(value)
        if all(_whole(t) and t >= 0 for t in ids):
            return tuple(map(int, ids))
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Request:
    """One prompt for the engine. stop_ids: every token that ends it, end-of-text ids included. bad_words: those
    of `params` as token ids. grammar: that of `params`, compiled.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None

    @property
    def steered(self) -> bool:
        """Tokens are biased or forbidden."""
        return bool(self.params.logit_bias or self.bad_words or (self.params.min_tokens and self.stop_ids))

    @property
    def traits(self) -> int:
        """What a program needs for it, a bit for each of the fields of `step.Sampling`, from the first."""
        p, sampled = self.params, self.params.temperature > 0
        rejection = sampled and not p.coupled
        bits = (sampled, p.filtered, sampled and p.coupled, rejection, p.penalized, self.steered)
        return sum(bit << i for i, bit in enumerate(bits))


#: What became of one block: drafted tokens verified that could be committed; of these, accepted; and accepted
#: without the window's cut, where the whole block was verified.
type Block = tuple[int, int, int]


@dataclass
class Stats:
    """Figures of one request. Histograms count decode steps, that is, steps after the first token.

    steps: target forwards that committed tokens of this prompt after its prefill. blocks: how many of them there
    were of each kind. cached_tokens: prompt tokens found in the prefix cache. Seconds run from admission to the
    first token, and on to the last.
    """

    steps: int = 0
    blocks: Counter[Block] = field(default_factory=Counter)
    cached_tokens: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def windows(self) -> Counter[int]:
        """Drafted tokens sent to verification."""
        return self._histogram(0)

    @property
    def accepted(self) -> Counter[int]:
        """Of these, accepted."""
        return self._histogram(1)

    @property
    def block_accepted(self) -> Counter[int]:
        """Accepted without the window's cut, where the whole block was verified (static and cap-accept)."""
        return self._histogram(2)

    @property
    def utilisation(self) -> float | None:
        """Drafted tokens accepted under the windows over those of whole blocks, where these were verified
        (static and cap-accept); None before any was accepted."""
        whole = sum(block_accepted * n for (_, _, block_accepted), n in self.blocks.items())
        return sum(accepted * n for (_, accepted, _), n in self.blocks.items()) / whole if whole else None

    def add(self, other: Stats) -> None:
        """Counts another request's figures in."""
        self.blocks.update(other.blocks)
        for name in ("steps", "cached_tokens", "preemptions", "prefill_seconds", "decode_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def _histogram(self, which: int) -> Counter[int]:
        counts: Counter[int] = Counter()
        for block, n in self.blocks.items():
            counts[block[which]] += n
        return counts


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the target's plain softmax; top: the likeliest tokens, and theirs."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Update(NamedTuple):
    """New tokens of one request, and why it ended if it did.

    logprobs: of the tokens. prompt_logprobs: of all prompt tokens but the first, with the first update. Both are
    () for requests that did not ask. problem: why an answer broke off that its grammar does not end here.
    """

    id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    problem: str | None = None
