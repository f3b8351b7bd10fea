"""Constrained decoding: which tokens are legal after which, as bit masks, through llguidance.

Knows: grammars and their compilation, the state of one answer within its grammar, tokens as bytes.
Does not know: requests, steps, windows, or how a mask reaches the logits (step.py).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, UInt
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import pre_tokenizers

from jspark import grammar_trial
from jspark.errors import UserError
from jspark.structured import StructuredOutputs
from jspark.tokenizer import Tokenizer

#: The end of texts that have no end token, or that ignore it: never drawn.
_NO_END = "<|no end|>"
#: Grammars that are kept compiled.
CACHE = 32
#: Seconds on the clock that a trial may take: far more than its processor seconds, for busy machines.
PATIENCE = 60.0


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar over one vocabulary; it makes a `Matcher` for each answer.

    words: 32-bit words of a mask. vocab: ids from here on are no tokens of the vocabulary; the first of them
    stands for the end of an answer that has no end token.
    """

    prototype: LLMatcher
    words: int
    vocab: int

    def matcher(self) -> Matcher:
        """The state of a new answer."""
        return Matcher(self, self.prototype.deep_copy())


class Matcher:
    """Where one answer stands in its grammar. problem: why it stopped before the end of its grammar, if it did."""

    def __init__(self, grammar: Grammar, state: LLMatcher):
        self.grammar = grammar
        self.problem: str | None = None
        self._state = state

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes in committed tokens, of which each was legal; an end of text is not to be among them."""
        taken = self._state.try_consume_tokens(list(tokens))
        if self._state.is_error():
            self.problem = self._state.get_error().splitlines()[0]
        elif taken != len(tokens):
            self.problem = f"token {tokens[taken]} is not of the grammar"

    def why_stopped(self, tokens: Sequence[int]) -> str | None:
        """The problem of an answer that ended with `tokens` for want of a legal one; None where it has none."""
        self.advance(tokens)
        masks([self], [[]], 1)
        return self.problem

    def _checked(self, bits: UInt[np.ndarray, "w m"], drafts: list[int]) -> int:
        """Clears what the model cannot write, and everything of an answer with a problem; counts legal drafts."""
        if self._state.is_error():
            self.problem = self._state.get_error().splitlines()[0]
        if self.problem is not None:
            bits[:] = 0
            return 0
        word, bit = divmod(self.grammar.vocab, 32)
        ended = bits[0, word] >> np.uint32(bit) & 1
        bits[:, word] &= np.uint32((1 << bit) - 1)
        bits[:, word + 1 :] = 0
        if not bits[0].any() and not ended:
            self.problem = "no token can write the text that must come next"
        legal = 0
        while legal < len(drafts) and bits[legal, drafts[legal] // 32] >> np.uint32(drafts[legal] % 32) & 1:
            legal += 1
        return legal


def masks(
    matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], width: int
) -> tuple[UInt[np.ndarray, "g w m"], Int[np.ndarray, " g"]]:
    """(bits, legal): legal tokens before and after each drafted token; how many drafts, from the first, are legal.

    drafts: up to width − 1 tokens an answer. Token t is bit t % 32 of word t // 32. Offsets after the first
    illegal draft, where nothing can be committed, allow anything. An answer with a problem is allowed nothing.
    """
    words = matchers[0].grammar.words
    bits = np.full((len(matchers), width, words), -1, np.int32)
    address, size, count = bits.ctypes.data, words * 4, bits.size // words
    each = [(m._state, i * width, list(d)) for i, (m, d) in enumerate(zip(matchers, drafts, strict=True))]
    drafted, first = [t for t in each if t[2]], [t[:2] for t in each if not t[2]]
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, address, size, count)
    if first:
        _executor().unsafe_compute_mask_ptr(first, address, size, count)
    bits = bits.view(np.uint32)
    legal = [m._checked(bits[i], each[i][2]) for i, m in enumerate(matchers)]
    return bits, np.asarray(legal, np.int32)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


class Grammars:
    """Compiles constraints over one vocabulary, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """`vocab_size`: of the model. `eos_token_ids`: tokens that end a text, legal where its grammar may end."""
        text, self._own = _completed(tokenizer)
        backend = tokenizers.Tokenizer.from_str(text)
        self._known = [i for i in eos_token_ids if i < min(vocab_size, self._own) and backend.id_to_token(i)]
        # An end token is no text, whatever its file says of it.
        backend.add_special_tokens([_NO_END, *(backend.id_to_token(i) for i in self._known)])
        self._text = backend.to_str()
        self._vocab = max(vocab_size, 1 + max(backend.get_vocab(with_added_tokens=True).values()))
        self._origin = tokenizer.origin
        self._cache: OrderedDict[tuple[str, str, bool], Grammar] = OrderedDict()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, constraint: StructuredOutputs, ignore_eos: bool = False) -> Grammar:
        """The grammar of a constraint. ignore_eos: an answer goes on for as long as its grammar can.

        Raises:
            UserError: the constraint is invalid, unsupported, unsatisfiable or too complex.
        """
        key = (constraint.kind, constraint.text, ignore_eos)
        found = self._cached(key)
        if found is not None:
            return found
        with self._compiling:
            found = self._cached(key)
            if found is not None:
                return found
            vocabulary = self._endless if ignore_eos or not self._known else self._ending
            definition = self._trials(constraint)
            prototype = LLMatcher(vocabulary, definition, log_level=0, limits=grammar_trial.limits())
            if prototype.is_error():
                raise _unusable(constraint, prototype.get_error().splitlines()[0])
        grammar = Grammar(prototype, -(-self._vocab // 32), self._own)
        with self._lock:
            self._cache[key] = grammar
            if len(self._cache) > CACHE:
                self._cache.popitem(last=False)
        return grammar

    def _cached(self, key: tuple[str, str, bool]) -> Grammar | None:
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    @cached_property
    def _trials(self) -> _Trials:
        return _Trials(self._text, self._vocab, self._known or [self._own])

    @cached_property
    def _ending(self) -> LLTokenizer:
        return self._vocabulary(self._known)

    @cached_property
    def _endless(self) -> LLTokenizer:
        return self._vocabulary([self._own])

    def _vocabulary(self, ends: list[int]) -> LLTokenizer:
        try:
            return LLTokenizer(self._text, n_vocab=self._vocab, eos_token=ends)
        except ValueError as e:
            raise UserError(
                f"the tokenizer of {self._origin} cannot be used with structured outputs ({e}); drop them"
            ) from None


class _Trials:
    """The process that tries grammars (grammar_trial.py), started when needed and again after one broke it."""

    def __init__(self, tokenizer: str, vocab: int, ends: list[int]):
        self._hello = {"tokenizer": tokenizer, "vocab": vocab, "eos": ends}
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, constraint: StructuredOutputs) -> str:
        """The constraint in llguidance's form; UserError for one that is refused, or breaks the process."""
        task = {"kind": constraint.kind, "text": constraint.text}
        if self._process is None:
            # -P: the script's own folder is no place to import from.
            command = [sys.executable, "-P", str(Path(grammar_trial.__file__))]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._end = weakref.finalize(self, _end, process)
            self._process = process
            answer = self._ask(process, self._hello, task)
        else:
            answer = self._ask(self._process, task)
        if answer is None:
            self._end()
            self._process = None
            raise _unusable(constraint, "it is too large, too deeply nested or too complex")
        if "error" in answer:
            raise _unusable(constraint, answer["error"])
        return answer["grammar"]

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], *messages: dict[str, Any]) -> dict[str, str] | None:
        """The answer to the last message; None when the process did not live to give one."""
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(PATIENCE, process.kill)
        alarm.daemon = True
        alarm.start()
        try:
            for message in messages:
                process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            alarm.cancel()
        return json.loads(line) if line else None


def _completed(tokenizer: Tokenizer) -> tuple[str, int]:
    """The tokenizer as JSON, able to write every text as it is; and the id from which on tokens are made up.

    llguidance lets the tokenizer write text that must come next, and takes its word for it. So there is no
    normalisation to a form of Unicode, and bytes that it lacks become tokens that the model never draws.
    """
    settings = json.loads(tokenizer.backend.to_str())
    vocabulary, decoder = settings["model"]["vocab"], json.dumps(settings["decoder"])
    if not isinstance(vocabulary, dict) or not ("ByteLevel" in decoder or "ByteFallback" in decoder):
        raise UserError(
            f"the tokenizer of {tokenizer.origin} does not work on bytes, which structured outputs need; drop them"
        )
    known = tokenizer.backend.get_vocab(with_added_tokens=True)
    own = 1 + max(known.values())
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in decoder else []
    lacking = sorted(c for c in alphabet if c not in known)
    vocabulary |= {token: own + i for i, token in enumerate([_NO_END, *lacking])}
    settings["normalizer"] = _without_forms(settings.get("normalizer"))
    return json.dumps(settings | {"padding": None, "truncation": None}), own


def _without_forms(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    if normalizer["type"] == "Sequence":
        parts = [_without_forms(n) for n in normalizer["normalizers"]]
        return {"type": "Sequence", "normalizers": [n for n in parts if n is not None]}
    return normalizer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it was to read
                pipe.close()


def _unusable(constraint: StructuredOutputs, why: str) -> UserError:
    return UserError(f"the {constraint.what} cannot be used: {why}; change it accordingly")
