"""Asking conversations of one drafter, and what is kept of it: texts, steps, seconds.

Knows: LLM and the records of its engine. Does not know: what is computed from them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from jspark.evaluate.data import DataSet
from jspark.llm import LLM, Output
from jspark.record import StepRecord
from jspark.request import SamplingParams


@dataclass(frozen=True)
class Run:
    """Answers to a data set, with every decode step after each answer's first token. NumPy arrays.

    conversation, turn, prompt_length, start [t]: of every text, which is prompt and answer; tokens: all texts one
    after the other, text i from start[i]. text, position, count, block_accepted [n], confidence [n, γ]: of every
    step, as in `StepRecord`; text is its index. seconds: of the whole batch, prefill included, compilation of
    programs left out. left_out: turns that would not have fitted the context.
    """

    conversation: np.ndarray
    turn: np.ndarray
    prompt_length: np.ndarray
    start: np.ndarray
    tokens: np.ndarray
    text: np.ndarray
    position: np.ndarray
    count: np.ndarray
    block_accepted: np.ndarray
    confidence: np.ndarray
    seconds: np.ndarray
    left_out: np.ndarray

    def texts(self) -> list[np.ndarray]:
        """The token ids of every text."""
        return np.split(self.tokens, self.start[1:])

    @property
    def new_tokens(self) -> int:
        """Tokens of all answers."""
        return len(self.tokens) - int(self.prompt_length.sum())

    def arrays(self) -> dict[str, np.ndarray]:
        """All fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def answers(self) -> dict[tuple[int, int], list[int]]:
        """(conversation, turn) → the answer's token ids."""
        pairs = zip(self.conversation.tolist(), self.turn.tolist(), strict=True)
        cut = zip(self.texts(), self.prompt_length, strict=True)
        return {key: text[n:].tolist() for key, (text, n) in zip(pairs, cut, strict=True)}


class Recorder:
    """An observer that keeps records until they are taken."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> None:
        """Keeps one step."""
        self._records.append(record)

    def clear(self) -> None:
        """Forgets what it has."""
        self._records = []

    def take(self) -> dict[str, np.ndarray]:
        """The arrays of all steps since the last call, joined."""
        records, self._records = self._records, []
        names = ("request", "position", "block_accepted", "count", "confidence")
        return {n: np.concatenate([getattr(r, n) for r in records]) for n in names}


def request_seed(seed: int, data_set: str, conversation: int, turn: int) -> int:
    """A request's seed: the same for every drafter, and for every order in which data sets are run."""
    entropy = (seed % 2**63, zlib.crc32(data_set.encode()), conversation, turn)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0])


def answer(
    llm: LLM,
    recorder: Recorder,
    data: DataSet,
    params: SamplingParams,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Run:
    """Asks all conversations of `data`, each turn of all of them as one batch, and gathers what happened.

    recorder: the LLM's observer. params: of every request, which gets a seed of its own where it is sampled.
    A turn that would not fit the context any more, because the answers before it became long as text, is left
    out and counted. progress: called with the number of answers that are ready.
    """
    target = llm.target
    context = llm.engine.config.context_length
    recorder.clear()
    messages: list[list[dict[str, str]]] = [[] for _ in data.conversations]
    texts: list[tuple[int, int, list[int], list[int]]] = []
    steps: list[dict[str, np.ndarray]] = []
    left_out, seconds, done = 0, 0.0, 0
    alive = list(range(len(data.conversations)))
    for turn in range(max((len(c.turns) for c in data.conversations), default=0) or 1):
        prompts = []
        alive = [i for i in alive if turn == 0 or turn < len(data.conversations[i].turns)]
        for i in list(alive):
            conversation = data.conversations[i]
            if conversation.turns:
                messages[i].append({"role": "user", "content": conversation.turns[turn]})
            ids = target.chat_ids(messages[i]) if turn else conversation.first_ids(target)
            least = params.max_tokens if isinstance(params.max_tokens, int) else 1
            if turn and len(ids) + least > context:
                left_out += len(conversation.turns) - turn
                alive.remove(i)
            else:
                prompts.append(ids)
        if not alive:
            break
        each = [
            replace(params, seed=request_seed(seed, data.name, i, turn)) if params.temperature else params
            for i in alive
        ]
        compiled, started = llm.engine.programs.report.seconds, time.perf_counter()
        outputs: dict[int, Output] = {}
        for index, output in llm.as_completed(prompts, each):
            outputs[index] = output
            done += 1
            progress(done)
        seconds += time.perf_counter() - started - (llm.engine.programs.report.seconds - compiled)
        own = recorder.take()
        # Ids rise in the order of prompts, and every request has a record of its first token at least.
        _, own["text"] = np.unique(own["request"], return_inverse=True)
        own["text"] = own["text"] + len(texts)
        later = np.ones(len(own["text"]), bool)
        later[np.unique(own["text"], return_index=True)[1]] = False
        steps.append({n: v[later] for n, v in own.items()})
        for index, i in enumerate(alive):
            texts.append((i, turn, prompts[index], outputs[index].output_ids))
            if messages[i]:
                messages[i].append({"role": "assistant", "content": outputs[index].text or ""})
    lengths = np.array([len(p) + len(o) for _, _, p, o in texts], np.int64)
    joined = {n: np.concatenate([s[n] for s in steps]) for n in steps[0]}
    return Run(
        conversation=np.array([t[0] for t in texts], np.int32),
        turn=np.array([t[1] for t in texts], np.int32),
        prompt_length=np.array([len(t[2]) for t in texts], np.int64),
        start=np.cumsum(lengths) - lengths,
        tokens=np.concatenate([np.array([*p, *o], np.int32) for _, _, p, o in texts]),
        text=joined["text"].astype(np.int32),
        position=joined["position"].astype(np.int32),
        count=joined["count"].astype(np.int32),
        block_accepted=joined["block_accepted"].astype(np.int32),
        confidence=joined["confidence"].astype(np.float32),
        seconds=np.array(seconds),
        left_out=np.array(left_out),
    )
