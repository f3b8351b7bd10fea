"""The cost table measured: how an engine's own compiled programs are timed, and where the result is kept.

Knows: which programs stand for all of them, calls with random tokens, pages and slots at real shapes, medians, the
file in the cache folder and what makes it void.
Does not know: requests and the loop (engine.py), or what a table is good for (budget.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

import jspark
from jspark.adjust import Tables
from jspark.background import SIDE_BY_SIDE, side_by_side
from jspark.checkpoint.cache import cache_dir, make_folder
from jspark.config import EngineConfig
from jspark.cost import CostTable, additive
from jspark.errors import UserError, warn
from jspark.files import MAX_JSON, UnreadableError, read_text
from jspark.programs import Programs
from jspark.propose import Proposal
from jspark.shapes import ProposeShape, VerifyShape, at_least, verify_ends
from jspark.sizing import least_tokens
from jspark.state import SLOT, PackedArgs, SlotTable, StepArgs
from jspark.step import Pools, Sampling

#: What `Profiler` tells while it measures: programs timed, of how many, and the one that is next.
Tell = Callable[[int, int, str], None]


def tell_nobody(done: int, of: int, what: str) -> None:
    """Measures in silence."""


#: Runs of a program whose median counts, after one that does not; and seconds after which three are enough.
_RUNS, _FEWEST_RUNS, _ENOUGH = 7, 3, 1.0
#: Calls one behind the other in each run on devices that take calls ahead.
_CALLS = 4
#: Tokens of every row at the two contexts whose difference is the context term: where kernels attend, elsewhere.
_CONTEXTS, _CONTEXTS_IN_XLA = (256, 2048), (256, 1024)
#: Programs that are timed in any case: the first ones of `Profiler.shapes`.
_ENDS = 3
_FORMAT = 1


class Launches:
    """Calls of an engine's programs with random tokens, all rows alike. Pools are donated from call to call.

    slots: how many there are. pages: numbers of the pages that rows may use; rows share them where there are few,
    and every call writes there.
    """

    def __init__(
        self,
        programs: Programs,
        pools: Pools,
        slots: int,
        pages: Sequence[int],
        rng: np.random.Generator,
    ):
        self.programs, self.pools = programs, pools
        self._slots, self._pages, self._rng = slots, np.asarray(pages, np.int32), rng
        self._spec = programs.spec

    def fill(self) -> None:
        """Random keys and values in the pages; zeros would flatter the time."""

        def fill(pools: Pools, pages: jax.Array, key: jax.Array) -> Pools:
            def random(x: jax.Array) -> jax.Array:
                return x.at[pages].set(jax.random.normal(key, (len(self._pages), *x.shape[1:]), x.dtype))

            return jax.tree.map(random, pools)

        placement = jax.tree.map(lambda x: x.sharding, self.pools)
        call = self.programs.place((self._pages, jax.random.key(0)))
        self.pools = jax.jit(fill, donate_argnums=0, out_shardings=placement)(self.pools, *call)

    def slots(self, context: int) -> SlotTable:
        """A slot table in the middle of decoding, every row with `context` tokens, its window's included; a verify
        program uses it up."""
        words = SLOT.blank(self._slots + 1)
        slots = SLOT.view(words)
        slots.anchor[:] = self._tokens(self._slots + 1)
        slots.position[:], slots.remaining[:] = context - self._spec.block_size - 1, 1 << 20
        slots.live[:] = slots.speculative[:] = 1
        carried: Any = None
        if self._spec.drafter is not None and self._spec.drafter.eagle3 is not None:
            shape = self._slots + 1, self._spec.target.hidden_size
            carried = self._rng.normal(size=shape).astype(self.pools.target.k[0].dtype)
        return self.programs.place(SlotTable(words, carried))  # type: ignore[arg-type]

    def args(self, shape: VerifyShape, context: int) -> PackedArgs:
        """Arguments of a step of that shape, its tier filled."""
        rows, own = shape.rows, -(-context // self._spec.page_size)
        table = np.zeros((rows, shape.pages), np.int32)
        few = rows * own > len(self._pages)
        table[:, :own] = self._rng.choice(self._pages, (rows, own), replace=few)
        fields: dict[str, Any] = {
            "slot": self._rng.permutation(self._slots)[:rows].astype(np.int32),
            "decode": np.ones(rows, bool),
            "new": np.zeros(rows, bool),
            "entry": SLOT.blank(rows),
            "table": table,
            "budget": np.int32(shape.verify_tokens - rows),
            "threshold": np.float32(0),
            "min_window": np.zeros(rows, np.int32),
            "max_window": np.full(rows, self._spec.block_size, np.int32),
        }
        args = PackedArgs.of(StepArgs(**fields, prefill=None))
        words, table = self.programs.place((args.words, args.table))
        return replace(args, words=words, table=table)

    def proposal(self, rows: int) -> Proposal | None:
        """A random block with random confidence; None without a drafter."""
        shape = (rows, self._spec.block_size)
        if not shape[1]:
            return None
        confidence: Any = self._rng.normal(size=shape).astype(np.float32)
        return self.programs.place(Proposal(self._tokens(shape), confidence, None))

    def propose(self, shape: ProposeShape, slots: SlotTable, args: PackedArgs) -> Proposal:
        """Launches the propose program."""
        self.pools, proposal = self.programs.propose(shape, self.pools, slots, args, Tables())
        return proposal

    def verify(self, shape: VerifyShape, slots: SlotTable, args: PackedArgs, proposal: Proposal | None) -> Array:
        """Launches a verify program; what it sends back."""
        proposal = proposal if shape.drafts else None
        self.pools, _, _, packet = self.programs.verify(shape, self.pools, slots, args, proposal, Tables())
        return packet.words

    def draft_seconds(self, shape: VerifyShape, context: int) -> float:
        """Seconds of the propose program beside that verify program."""
        slots, args = self.slots(context), self.args(shape, context)
        assert shape.propose is not None
        return _seconds(partial(self.propose, shape.propose, slots, args), self._calls)

    def verify_seconds(self, shape: VerifyShape, context: int) -> float:
        """Seconds of a verify program; every call gets a slot table of its own, made before."""
        args, proposal = self.args(shape, context), self.proposal(shape.rows)
        tables: list[SlotTable] = []

        def launch() -> Any:
            return self.verify(shape, tables.pop(), args, proposal)

        def before() -> None:
            tables.extend(self.slots(context) for _ in range(self._calls - len(tables)))
            jax.block_until_ready(tables)

        return _seconds(launch, self._calls, before)

    @property
    def _calls(self) -> int:
        return 1 if self.programs.mesh.devices.flat[0].platform == "cpu" else _CALLS

    def _tokens(self, shape: int | tuple[int, ...]) -> Any:
        return self._rng.integers(self._spec.target.vocab_size, size=shape, dtype=np.int32)


def _at_a_time(mesh: Mesh) -> int:
    """Programs that are compiled, then timed, between two looks at the limit: several where timing is quick."""
    return 1 if mesh.devices.flat[0].platform == "cpu" else SIDE_BY_SIDE


def _seconds(launch: Callable[[], Any], calls: int, before: Callable[[], None] = lambda: None) -> float:
    """Seconds of a launch: median over runs of `calls` launches in a row; the first run does not count."""
    seconds: list[float] = []
    for run in range(_RUNS + 1):
        before()
        started = time.perf_counter()
        out = None
        for _ in range(calls):
            out = launch()
        jax.block_until_ready(out)
        if run:
            seconds.append((time.perf_counter() - started) / calls)
        if len(seconds) >= _FEWEST_RUNS and sum(seconds) * calls > _ENOUGH:
            break
    return statistics.median(seconds)


@dataclass(frozen=True)
class Profile:
    """A table and what it was made of. draft: seconds by R. verify: by (R, T). context: of a step at R and T, by
    tokens of every row. interpolated: how many of the table's sizes lie between measured ones. seconds: that the
    measuring took, compilation included. key: what it holds for.
    """

    table: CostTable
    draft: dict[int, float]
    verify: dict[tuple[int, int], float]
    context: dict[int, float]
    interpolated: int
    seconds: float
    key: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it; a cost table's file with more in it."""
        return self.table.to_dict() | {
            "measured": {
                "draft": self.draft,
                "verify": [[r, t, s] for (r, t), s in self.verify.items()],
                "context": self.context,
                "interpolated": self.interpolated,
                "seconds": self.seconds,
            },
            "key": self.key,
        }

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads `to_dict`'s JSON; raises UserError or the errors of Python for anything else."""
        raw = json.loads(text)
        measured = raw["measured"]
        return cls(
            CostTable.from_json(text),
            {int(r): float(s) for r, s in measured["draft"].items()},
            {(int(r), int(t)): float(s) for r, t, s in measured["verify"]},
            {int(n): float(s) for n, s in measured["context"].items()},
            int(measured["interpolated"]),
            float(measured["seconds"]),
            dict(raw["key"]),
        )


@dataclass(frozen=True)
class Profiler:
    """What can be timed of an engine. config: with all sizes chosen. page_steps: the ladder of page counts.
    context_length: tokens that a row can have, its window included.
    """

    programs: Programs
    config: EngineConfig
    page_steps: tuple[int, ...]
    context_length: int

    @property
    def contexts(self) -> tuple[int, int]:
        """Tokens of every row in the two measurements of the context term."""
        short, long = _CONTEXTS if self.programs.spec.attention.kernels else _CONTEXTS_IN_XLA
        return min(short, self.context_length), min(long, self.context_length)

    def pages(self, context: int) -> int:
        """Pages of the tables in programs for rows of so many tokens."""
        return at_least(self.page_steps, -(-context // self.config.page_size))

    @property
    def pages_wanted(self) -> int:
        """Pages that give every row of the largest step its own."""
        return self.config.row_buckets[-1] * -(-self.contexts[1] // self.config.page_size)

    def key(self) -> dict[str, Any]:
        """What a table depends on. Of weights only the shapes and dtypes count: their values change no time."""
        spec, device = self.programs.spec, self.programs.mesh.devices.flat[0]
        cpu = device.platform == "cpu"
        shapes = hashlib.sha256(json.dumps(self.programs.weights).encode()).hexdigest()
        facts = {
            "format": _FORMAT,
            "versions": {"jspark": jspark.__version__, **{p: version(p) for p in ("jax", "jaxlib")}},
            "device": [device.platform, device.device_kind, self.programs.mesh.size],
            "cores": len(os.sched_getaffinity(0)) if cpu and hasattr(os, "sched_getaffinity") else None,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "target": asdict(spec.target),
            "drafter": None if spec.drafter is None else asdict(spec.drafter),
            "weights": shapes,
            "dtype": self.config.dtype,
            "attention": asdict(spec.attention),
            "page_size": spec.page_size,
            "block_size": spec.block_size,
            "verify_mode": spec.verify_mode,
            "row_buckets": self.config.row_buckets,
            "token_tiers": self.config.token_tiers,
            "contexts": self.contexts,
            "pages": [self.pages(c) for c in self.contexts],
        }
        return json.loads(json.dumps(facts))

    def shapes(self) -> list[VerifyShape]:
        """The verify programs of the ladders, greedy and without prefill, the most telling ones first.

        The smallest tier of a row count is plain decoding, without drafts. The order: both ends of the ladders,
        the whole block of one row bucket after another, plain decoding at each, then the tiers between.
        """
        buckets, size = self.config.row_buckets, self.programs.spec.block_size
        least, compact = least_tokens(self.programs.mesh), self.programs.spec.verify_mode == "compact"
        pages = self.pages(self.contexts[0])
        full, plain, between = [], [], []
        for rows in (buckets[-1], *buckets[:-1]):
            fewest, most = verify_ends(rows, size, least)
            full.append(VerifyShape(rows, pages, Sampling(), most, True, None))
            plain.append(VerifyShape(rows, pages, Sampling(), fewest, False, None))
            tiers = [t for t in self.config.token_tiers if fewest < t < most] if compact else []
            between += [VerifyShape(rows, pages, Sampling(), t, True, None) for t in tiers]
        ends = [full[0], plain[min(1, len(plain) - 1)]]
        order = (*ends, *full[1:], *plain, *between)
        return list(dict.fromkeys(order))

    def measure(self, launches: Launches, limit: float | None, tell: Tell = tell_nobody) -> Profile:
        """Times the programs of `shapes`, their drafts and the context term.

        limit: seconds after which no further program is compiled and timed, None for all of them; the ends of the
        ladders are measured in any case, and sizes between measured ones are interpolated.
        """
        started = time.perf_counter()
        launches.fill()
        shapes, (short, long) = self.shapes(), self.contexts
        draft: dict[int, float] = {}
        verify: dict[tuple[int, int], float] = {}
        context: dict[int, tuple[float, float]] = {}
        ready = 0
        for i, shape in enumerate(shapes):
            due = i == ready
            if due and limit is not None and i >= _ENDS and time.perf_counter() - started > limit:
                break
            tell(i, len(shapes), f"R {shape.rows}, T {shape.verify_tokens}")
            if due:
                ready = i + _at_a_time(self.programs.mesh) if i else _ENDS
                side_by_side(self.programs.compile, shapes[i:ready])
            if shape.drafts and shape.rows not in draft:
                draft[shape.rows] = launches.draft_seconds(shape, short)
            verify[shape.rows, shape.verify_tokens] = launches.verify_seconds(shape, short)
            if i == 0 and long > short:
                # At the largest step the context stands out most.
                wide = replace(shape, pages=self.pages(long))
                context[short] = draft[shape.rows], verify[shape.rows, shape.verify_tokens]
                context[long] = launches.draft_seconds(wide, long), launches.verify_seconds(wide, long)
        tell(len(shapes), len(shapes), "done")
        return self._profile(draft, verify, context, time.perf_counter() - started)

    def _profile(
        self,
        draft: dict[int, float],
        verify: dict[tuple[int, int], float],
        context: dict[int, tuple[float, float]],
        seconds: float,
    ) -> Profile:
        """The table; what was not measured is interpolated. What the short context costs stays in it."""
        shapes, token = self.shapes(), 0.0
        if context:
            (short, before), (long, after) = sorted(context.items())
            token = max(0.0, sum(after) - sum(before)) / (self.config.row_buckets[-1] * (long - short))
        rows = sorted({s.rows for s in shapes})
        at, costs = np.array(sorted(draft.items())).T
        drafts = dict(zip(rows, np.interp(rows, at, costs).tolist(), strict=True))
        table = additive(drafts, verify)
        tiers = sorted({s.verify_tokens for s in shapes})
        costs = np.interp(tiers, list(table.verify), list(table.verify.values())).tolist()
        table = CostTable(table.draft, dict(zip(tiers, costs, strict=True)), token)
        interpolated = len(rows) - len(draft) + len(tiers) - len({t for _, t in verify})
        measured = {n: sum(pair) for n, pair in context.items()}
        return Profile(table, draft, verify, measured, interpolated, seconds, self.key())

    def file(self) -> Path:
        """Where this engine's table is kept."""
        digest = hashlib.sha256(json.dumps(self.key(), sort_keys=True).encode()).hexdigest()
        return cache_dir() / "cost" / f"{digest[:32]}.json"

    def kept(self) -> Profile | None:
        """The table that was kept for an engine like this one; None where there is none that can be read."""
        try:
            profile = Profile.from_json(read_text(self.file(), MAX_JSON))
        except (UnreadableError, UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return profile if profile.key == self.key() else None

    def keep(self, profile: Profile) -> None:
        """Keeps `profile` for later engines; a file is whole or not there. UserError when it cannot be written."""
        file = self.file()
        unfinished = make_folder(file.parent) / f"{file.stem}.{os.getpid()}.unfinished"
        try:
            unfinished.write_text(json.dumps(profile.to_dict()), encoding="utf-8")
            unfinished.replace(file)
        except OSError as e:
            raise UserError(f"the cost table {file} cannot be written ({e.strerror}); make room there") from None
        finally:
            unfinished.unlink(missing_ok=True)


def warn_if_flat(table: CostTable) -> None:
    """A table that says nothing about the budget is worth a warning, with its numbers."""
    if table.is_flat:
        (small, cheap), *_, (large, dear) = [*table.verify.items()] * 2
        warn(
            f"the cost table is flat: verifying {small} tokens takes {cheap * 1e3:.3g} ms and {large} tokens "
            f"{dear * 1e3:.3g} ms, so a search by cost verifies everything; measure it again with jspark profile, "
            "on a machine that does nothing else"
        )
