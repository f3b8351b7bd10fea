"""The target writes text: thousands of rows decode in one device program that the host never waits for.

Knows: how a row goes from its script over a question to an answer and starts again, contiguous caches, and that
layers and sampling are the engine's own: a conversation is what the engine gives for the same prompt and seed.
Does not know: chat templates (conversations.py), which conversations are kept (select.py), or files.

Why not the engine: its host works for every row of every step (arrivals, streams, pages), and nothing here needs
that; a program of its own leaves rows by the thousand to the device.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jspark.config import DecoderConfig
from jspark.landing import fetch, fetch_later
from jspark.models.decoder import Decoder
from jspark.models.layers import Rotary
from jspark.sampling import RowSampling, draft_token, log_probs
from jspark.train.attention import Implementation, attend_cache

_UNFINISHED = -1


@dataclass(frozen=True)
class Script:
    """What rows start from. tokens: [q, p], padded; lengths: [q]. A row continues its script by sampling.

    shared: 0 where script i is the whole prompt of conversation i. Otherwise so many leading tokens are the same
    in all scripts, which are the openings of questions, taken in turns: the row writes the rest of the question,
    ended by a stop token or after max_question tokens, then the script's connector follows (the end of the
    user's turn and the opening of the answer; [q, c], padded), then the answer.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    shared: int = 0
    connectors: np.ndarray = field(default_factory=lambda: np.zeros((1, 1), np.int32))
    connector_lengths: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))

    @property
    def asks(self) -> bool:
        """Whether questions are written too."""
        return self.shared > 0

    def of(self, conversation):
        """The script of a conversation, or of an array of them; anything valid for −1."""
        count = len(self.lengths)
        return conversation % count if self.asks else conversation.clip(0, count - 1)


@dataclass(frozen=True)
class Writing:
    """How text is written. Temperatures are taken in turns by conversation number; 0 is greedy.

    rows: decoded at the same time. loop: an answer ends once it has repeated so many tokens in a row verbatim.
    steps: decode steps a device call.
    """

    rows: int
    max_question: int
    max_answer: int
    question_temperatures: tuple[float, ...]
    answer_temperatures: tuple[float, ...]
    loop: int
    stop_ids: tuple[int, ...]
    seed: int = 0
    steps: int = 128
    attention: Implementation = "xla"

    def seed_of(self, conversation: int) -> int:
        """The request seed that gives this conversation in the engine: distinct for 2³² conversations."""
        return (self.seed * 2_654_435_761 + conversation) % 2**32

    def temperature_of(self, conversation: int) -> float:
        """The temperature its answer is sampled at."""
        return self.answer_temperatures[conversation % len(self.answer_temperatures)]


@dataclass(frozen=True)
class Written:
    """One conversation: its number, token ids, and where the answer starts. stopped: by a stop token."""

    id: int
    tokens: np.ndarray
    answer_start: int
    stopped: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rows:
    """State of the decoding rows. keys, values: [r, c, k, d] a layer. id: −1 idle. run[j]: how many tokens up to
    position j equal those up to the current one."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    id: Int[Array, " r"]
    token: Int[Array, " r"]
    position: Int[Array, " r"]
    question_end: Int[Array, " r"]
    history: Int[Array, "r c"]
    run: Int[Array, "r c"]
    next_id: Int[Array, ""]


def decode(
    decoder: Decoder,
    config: DecoderConfig,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    token: Int[Array, " r"],
    position: Int[Array, " r"],
    attention: Implementation,
) -> tuple[Float[Array, "r v"], tuple[Array, ...], tuple[Array, ...]]:
    """One token a row through the target over contiguous caches: float32 logits, and the caches with it."""
    rotary = Rotary(config.rope, config.head_dim, config.max_position, position)
    x = decoder.embed(token)
    rows = jnp.arange(token.shape[0], dtype=jnp.int32)
    keys_out, values_out = list(keys), list(values)
    for i in range(config.num_layers):
        layer = decoder.layers.layer(i)
        q, k, v = layer.qkv(x, rotary)
        keys_out[i] = keys_out[i].at[rows, position].set(k, mode="promise_in_bounds")
        values_out[i] = values_out[i].at[rows, position].set(v, mode="promise_in_bounds")
        x = layer.finish(x, attend_cache(q, keys_out[i], values_out[i], position + 1, attention, config.window(i)))
    return decoder.vocabulary.head.attend(decoder.norm(x)), tuple(keys_out), tuple(values_out)


class Writer:
    """Conversations of one target, in the order they end.

    `first`: numbers that are written first (those a killed run left unfinished), then those from `next_id` on, up
    to `count` in all.
    """

    def __init__(self, decoder: Decoder, config: DecoderConfig, script: Script, writing: Writing):
        self._leaves, self._tree = jax.tree.flatten(decoder)
        self._config, self._script, self._writing = config, script, writing
        longest = int(script.lengths.max())
        question = writing.max_question + script.connectors.shape[1] if script.asks else 0
        # Rows of 64 positions: what attention kernels like.
        self._capacity = -(-(longest + question + writing.max_answer) // 64) * 64
        # A row that starts again finds the shared opening in its cache, whole.
        self._start = max(script.shared - 1, 0)
        self._exact = self._leaves[0].dtype == jnp.float32
        self._compiled = None
        arrays = (script.tokens, script.lengths, script.connectors, script.connector_lengths)
        self._scripts = tuple(jnp.asarray(x, jnp.int32) for x in arrays)
        self.steps = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache."""
        c = self._config
        size = self._leaves[0].dtype.itemsize
        return 2 * c.num_layers * self._writing.rows * self._capacity * c.num_kv_heads * c.head_dim * size

    def write(self, first: list[int], next_id: int, count: int) -> Generator[list[Written], None, None]:
        """Finished conversations, a device call at a time; ends when all `count` are written."""
        rows = self._writing.rows
        ids = np.full(rows, _UNFINISHED, np.int32)
        ids[: min(len(first), rows)] = first[:rows]
        assert len(first) <= rows, "a killed run leaves at most one unfinished conversation a row"
        fresh = np.arange(next_id, min(next_id + rows - len(first), count))
        ids[len(first) : len(first) + len(fresh)] = fresh
        next_id += len(fresh)
        # A copy on the device: the state is donated.
        state = self._initial(ids, next_id)
        books = _Books(ids, next_id, count, self._script, self._start)
        flying = None
        try:
            while books.live:
                state, out = self._call(state, np.int32(count))
                for leaf in out:
                    fetch_later(leaf)
                self.steps += self._writing.steps
                if flying is not None:
                    yield books.collect(*(fetch(x) for x in flying))
                flying = out
        finally:
            # Not left running when nobody wants more.
            jax.block_until_ready(state)

    def _initial(self, ids: np.ndarray, next_id: int) -> _Rows:
        c, rows = self._config, self._writing.rows
        shape = (rows, self._capacity, c.num_kv_heads, c.head_dim)
        dtype = self._leaves[0].dtype

        def cache() -> tuple[Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(c.num_layers))

        first = self._script.tokens[self._script.of(ids), 0]
        history = np.full((rows, self._capacity), -1, np.int32)
        history[:, 0] = first
        return _Rows(
            keys=cache(),
            values=cache(),
            id=jnp.asarray(ids),
            token=jnp.asarray(first.astype(np.int32)),
            position=jnp.zeros(rows, jnp.int32),
            question_end=jnp.asarray(self._question_end(ids)),
            history=jnp.asarray(history),
            run=jnp.zeros((rows, self._capacity), jnp.int32),
            next_id=jnp.asarray(next_id, jnp.int32),
        )

    def _question_end(self, ids: np.ndarray) -> np.ndarray:
        if self._script.asks:
            return np.full(len(ids), _UNFINISHED, np.int32)
        return self._script.lengths[self._script.of(ids)].astype(np.int32)

    def _call(self, state: _Rows, count: np.int32):
        arguments = (self._leaves, state, self._scripts, jnp.asarray(count))
        if self._compiled is None:
            context = "highest" if self._exact else None
            gpu = next(iter(self._leaves[0].devices())).platform != "cpu"
            with jax.default_matmul_precision(context):
                program = jax.jit(partial(self._run, self._tree), donate_argnums=(1,))
                options = {"xla_gpu_enable_triton_gemm": False} if gpu else {}
                self._compiled = program.lower(*arguments).compile(options)
        return self._compiled(*arguments)

    def _run(self, tree, leaves, state, scripts, count):
        decoder = jax.tree.unflatten(tree, leaves)
        return jax.lax.scan(lambda s, _: self._step(decoder, s, scripts, count), state, length=self._writing.steps)

    def _step(self, decoder: Decoder, s: _Rows, script_arrays: tuple[Array, ...], count: Array):
        w, script = self._writing, self._script
        scripts, lengths, connectors, connector_lengths = script_arrays
        logits, keys, values = decode(decoder, self._config, s.keys, s.values, s.token, s.position, w.attention)
        place = s.position + 1
        mine = script.of(s.id)
        length = lengths[mine]
        asking = s.question_end < 0
        sampled = self._sample(logits, s.id, s.position, asking)

        in_script = place < length
        stops = jnp.any(sampled[:, None] == jnp.asarray(w.stop_ids, jnp.int32)[None], axis=1)
        question_end, connecting, follow = s.question_end, jnp.zeros_like(asking), sampled
        connector_length = jnp.zeros_like(length)
        if script.asks:
            ends = asking & ~in_script & (stops | (place - length >= w.max_question))
            question_end = jnp.where(ends, place, question_end)
            connector_length = connector_lengths[mine]
            into = place - question_end
            connecting = (question_end >= 0) & (into < connector_length)
            follow = connectors[mine, jnp.clip(into, 0, connectors.shape[1] - 1)]
        written = jnp.where(connecting, follow, sampled)
        token = jnp.where(in_script, scripts[mine, jnp.minimum(place, scripts.shape[1] - 1)], written)
        answer_start = question_end + connector_length
        answering = (question_end >= 0) & (place >= answer_start)

        # Common suffixes of the text so far with itself, for loops.
        before = jnp.pad(s.run, ((0, 0), (1, 0)))[:, :-1]
        run = jnp.where((s.history == token[:, None]) & answering[:, None], before + 1, 0)
        columns = jnp.arange(run.shape[1], dtype=jnp.int32)[None]
        history = jnp.where(columns == place[:, None], token[:, None], s.history)

        loops = jnp.max(run, axis=1) >= w.loop
        full = place - answer_start + 1 >= w.max_answer
        done = (s.id >= 0) & answering & (stops | loops | full)
        rank = jnp.cumsum(done.astype(jnp.int32)) - 1
        fresh = s.next_id + rank
        new_id = jnp.where(done, jnp.where(fresh < count, fresh, _UNFINISHED), s.id)
        theirs = script.of(new_id)
        start = jnp.full_like(place, self._start)
        restart = lengths[theirs] if not script.asks else jnp.full_like(place, _UNFINISHED)
        idle = new_id < 0
        past = columns > start[:, None]
        kept = scripts[theirs][:, :1] if self._start == 0 else None
        cleared = history if kept is None else jnp.where(columns == 0, kept, history)
        rows = replace(
            s,
            keys=keys,
            values=values,
            id=new_id,
            token=jnp.where(done, scripts[theirs, start], token),
            # An idle row stays where it is and writes over one position.
            position=jnp.where(done | idle, start, place),
            question_end=jnp.where(done, restart, question_end),
            history=jnp.where(done[:, None], jnp.where(past, -1, cleared), history),
            run=jnp.where(done[:, None], 0, run),
            next_id=s.next_id + jnp.sum(done.astype(jnp.int32)),
        )
        return rows, (token, done, jnp.where(done, answer_start, 0), stops & done)

    def _sample(self, logits: Array, ids: Array, position: Array, asking: Array) -> Array:
        w = self._writing
        asks = jnp.asarray(w.question_temperatures, jnp.float32)
        answers = jnp.asarray(w.answer_temperatures, jnp.float32)
        number = jnp.maximum(ids, 0)
        temperature = jnp.where(asking, asks[number // len(answers) % len(asks)], answers[number % len(answers)])
        base = np.uint32(self._writing.seed_of(0))
        off = jnp.zeros_like(temperature)
        rows = RowSampling(
            temperature=temperature,
            top_k=jnp.zeros_like(number),
            top_p=off + 1,
            min_p=off,
            seed=base + number.astype(jnp.uint32),
            coupled=jnp.ones_like(asking),
        )
        return draft_token(log_probs(logits, rows, filtered=False), rows, position, 0, sampled=True)


class _Books:
    """The host's side: which row writes which conversation, and its tokens so far."""

    def __init__(self, ids: np.ndarray, next_id: int, count: int, script: Script, start: int):
        self._ids = ids.copy()
        self._next, self._count = next_id, count
        self._script, self._start = script, start
        self._pieces: list[list[np.ndarray]] = [[self._opening(i, 0)] for i in ids]

    @property
    def live(self) -> bool:
        """Whether any row still writes."""
        return bool((self._ids >= 0).any())

    def _opening(self, conversation: int, start: int) -> np.ndarray:
        return self._script.tokens[self._script.of(np.int64(conversation)), : start + 1].astype(np.int32)

    def collect(
        self, token: np.ndarray, done: np.ndarray, start: np.ndarray, stopped: np.ndarray
    ) -> list[Written]:
        """Conversations that ended in a call's arrays [steps, r]."""
        out = []
        begin = np.zeros(len(self._ids), np.int64)
        # Row-major: numbers are given in the device's order.
        for step, row in zip(*np.nonzero(done), strict=True):
            self._pieces[row].append(token[begin[row] : step + 1, row])
            tokens = np.concatenate(self._pieces[row])
            out.append(Written(int(self._ids[row]), tokens, int(start[step, row]), bool(stopped[step, row])))
            self._ids[row] = self._next if self._next < self._count else _UNFINISHED
            self._next += 1
            self._pieces[row] = [self._opening(int(self._ids[row]), self._start)]
            begin[row] = step + 1
        for row in np.flatnonzero(self._ids >= 0):
            self._pieces[row].append(token[begin[row] :, row].copy())
        return out
