"""The compiled programs of an engine, by shape: what stands in the place of CUDA-graph tiers.

Knows: compilation, ahead of time, in a step or in the background, and its cost; donation; which compiled program
to run in place of one that is not ready.
Does not know: requests, or what a step asks for (engine.py decides).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspark.adjust import Tables, empty_tables, write_row
from jspark.background import Background
from jspark.checkpoint.cache import cache_dir, make_folder
from jspark.mask import Mask, host_mask
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.packing import Layout
from jspark.propose import Proposal
from jspark.shapes import ProposeShape, VerifyShape, cheapest
from jspark.state import PackedArgs, PackedPacket, Packet, SlotTable, packet_layout
from jspark.steady import keep_holes
from jspark.step import Pools, Spec, propose_step, verify_step

#: How XLA compiles for a GPU.
_ON_A_GPU: dict[str, Any] = {
    # XLA tunes a Triton kernel for every product, minutes a program; cuBLAS has them ready.
    "xla_gpu_enable_triton_gemm": False,
    # Would join products of the same input by copying their weights in every run; ours are joined already.
    "xla_gpu_dot_merger_threshold_mb": 0,
    # A program is one CUDA graph. Its kernels follow one another anyway, and a chain costs the host the least.
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
    # A trace then shows what runs without it.
    "xla_enable_command_buffers_during_profiling": True,
}


def use_compilation_cache() -> None:
    """Keeps compiled programs on disk between runs; does nothing if the user has chosen a place already.

    Raises UserError when our own place cannot be written.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(make_folder(cache_dir() / "xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@dataclass
class CompileReport:
    """Programs compiled in this process and the seconds they took (cache hits included, at their cost)."""

    programs: int = 0
    seconds: float = 0.0
    by_shape: dict[str, float] = field(default_factory=dict)

    def add(self, shape: str, seconds: float) -> None:
        """Counts a program."""
        self.programs += 1
        self.seconds += seconds
        self.by_shape[shape] = seconds


class Programs:
    """Compiles and calls. Pools and slots are donated: the caller must use what comes back.

    background: programs that a step lacks are compiled by a thread, as soon as `expect` has told with what.
    """

    def __init__(
        self,
        spec: Spec,
        target: Decoder,
        drafter: AnyDrafter | None,
        mesh: Mesh,
        sts: np.ndarray | None = None,
        background: bool = False,
    ):
        self.spec = spec
        self.report = CompileReport()
        self.mesh = mesh
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._sts = None if sts is None else jax.device_put(jnp.asarray(sts, jnp.float32), self._replicated)
        # Flat tuples: a call then flattens nothing in Python.
        self._target, self._target_tree = jax.tree.flatten(target)
        self._drafter, self._drafter_tree = jax.tree.flatten(drafter)
        vocabulary = None if drafter is None else drafter.vocabulary(target.vocabulary)
        self._vocabulary, self._vocabulary_tree = jax.tree.flatten(vocabulary)
        self._compiled: dict[Any, Callable] = {}
        self._proposals: dict[ProposeShape, Proposal] = {}
        self._under_way: dict[Any, threading.Event] = {}
        self._lock = threading.Lock()
        self._own_thread = background
        self.background = Background(self.compile, _problem)
        exact = self._target[0].dtype == jnp.float32
        gpu = mesh.devices.flat[0].platform != "cpu"
        #: Programs kept at most. One of a CPU takes 160 memory maps or so, of which a process may have 65,530 by
        #: Linux's default; one more ends it. The oldest go, and come back from the cache on disk.
        self.most = None if gpu else 256
        self._options: dict[str, Any] = _ON_A_GPU if gpu else {}
        self._guards = keep_holes(mesh) if gpu else []
        # float32 means float32: without this a GPU multiplies in tf32.
        self._precision = partial(jax.default_matmul_precision, "highest") if exact else contextlib.nullcontext

    def use_temperatures(self, table: np.ndarray) -> None:
        """Other temperatures from the next step on; for an engine that began with some."""
        self._sts = self.place(np.asarray(table, np.float32))

    def place(self, host: Any) -> Any:
        """Host arrays on every device of the mesh."""
        return jax.device_put(host, self._replicated)

    def send(self, host: Any) -> Any:
        """Host arrays for a program's arguments: one device takes NumPy's with the call, which is quicker."""
        return self.place(host) if self.mesh.size > 1 else host

    @property
    def weights(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of all weights."""
        return [(x.shape, x.dtype.name) for x in (*self._target, *self._drafter)]

    # ── which program ─────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, pools: Pools, slots: SlotTable, blank: Callable[[VerifyShape], PackedArgs]) -> None:
        """Tells what programs will be called with, so that they can be compiled before. blank: arguments."""
        self._expected = *jax.tree.map(_like, (pools, slots)), blank

    def ready(self, shape: VerifyShape) -> bool:
        """Whether a step of that shape has nothing to compile."""
        return shape in self._compiled and (shape.propose is None or shape.propose in self._compiled)

    def choose(self, wanted: VerifyShape, chunks: Sequence[int]) -> VerifyShape:
        """The shape to run for a step that asks for `wanted`; chunks: see `serves`.

        It is `wanted` where that is ready, or where nothing is compiled in the background. Else `wanted` is
        compiled there, and the cheapest ready program that serves runs in its place; where none does, the step
        compiles.
        """
        if not self._own_thread or self.ready(wanted):
            return wanted
        have = [s for s in list(self._compiled) if isinstance(s, VerifyShape) and self.ready(s)]
        found = cheapest(have, wanted, chunks)
        if found is not None:
            self.background.add([wanted], urgent=True)
        return found or wanted

    def compile(self, shape: VerifyShape) -> None:
        """Makes the programs of a step of that shape ready; needs `expect`."""
        pools, slots, blank = self._expected
        args = blank(shape)
        tables = empty_tables(slots.words.shape[0] - 1, self.spec.target.vocab_size)
        tables = tables.only(penalties=shape.sampling.penalties, steering=shape.sampling.steering)
        tables = jax.tree.map(self._as_placed, tables)
        proposal = mask = None
        if shape.propose is not None:
            self._ready(shape.propose, *self._propose(shape.propose, pools, slots, args, tables))
            proposal = self._proposals[shape.propose]
        if shape.masked:
            width = self.spec.block_size + 1 if shape.drafts else 1
            blank_mask = host_mask([], [], shape.rows, width, self.spec.target.vocab_size, shape.masked)
            mask = jax.tree.map(self._as_placed, blank_mask)
        self._ready(shape, *self._verify(shape, pools, slots, args, proposal, tables, mask))

    def _as_placed(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────

    def write_row(self, tables: Tables, slot: Array, row: Tables) -> Tables:
        """Writes a new request's entries into the tables (donated)."""
        key = ("row", jax.tree.structure(tables))
        return self._call(key, write_row, (0,), lambda: self._replicated, tables, slot, row)

    def propose(
        self, shape: ProposeShape, pools: Pools, slots: SlotTable, args: PackedArgs, tables: Tables
    ) -> tuple[Pools, Proposal]:
        """Drafts for the rows of a step; the drafter's pool is donated where kernels draft."""
        proposal, written = self._call(shape, *self._propose(shape, pools, slots, args, tables))
        return pools if written is None else replace(pools, drafter=written), proposal

    def _propose(
        self, shape: ProposeShape, pools: Pools, slots: SlotTable, args: PackedArgs, tables: Tables
    ) -> Any:
        """What `_call` takes, after its key; everything may be shapes instead of arrays."""

        def run(leaves, vocabulary, pool, slots, words, table, tables):
            drafter = jax.tree.unflatten(self._drafter_tree, leaves)
            view = jax.tree.unflatten(self._vocabulary_tree, vocabulary)
            step = args.unpack(words, table, None)
            return propose_step(self.spec, drafter, view, pool, slots, step, tables, sampling=shape.sampling)

        def placement() -> Any:
            return self._replicated, jax.tree.map(lambda x: x.sharding, pools.drafter) if writes else None

        writes = self.spec.attention.draft != "xla"
        call = (self._drafter, self._vocabulary, pools.drafter, slots, args.words, args.table, tables)
        return run, (2,) if writes else (), placement, *call

    def verify(
        self,
        shape: VerifyShape,
        pools: Pools,
        slots: SlotTable,
        args: PackedArgs,
        proposal: Proposal | None,
        tables: Tables,
        mask: Mask | None = None,
    ) -> tuple[Pools, SlotTable, Tables, PackedPacket]:
        """Runs the target over the packed step and commits; pools, slots and tables are donated."""
        *state, words = self._call(shape, *self._verify(shape, pools, slots, args, proposal, tables, mask))
        return *state, PackedPacket(words, self._packet(shape))

    def _packet(self, shape: VerifyShape) -> Layout[Packet]:
        size = self.spec.block_size if shape.drafts else 0
        prefill = shape.prefill[0] if shape.prefill else 0
        return packet_layout(shape.rows, size, shape.logprobs, shape.prompt_logprobs, prefill)

    def _verify(
        self,
        shape: VerifyShape,
        pools: Pools,
        slots: SlotTable,
        args: PackedArgs,
        proposal: Proposal | None,
        tables: Tables,
        mask: Mask | None,
    ) -> Any:
        layout = self._packet(shape)

        def run(target, drafter, pools, slots, tables, arrays, proposal, sts, mask):
            *state, packet = verify_step(
                self.spec,
                jax.tree.unflatten(self._target_tree, target),
                jax.tree.unflatten(self._drafter_tree, drafter),
                pools,
                slots,
                args.unpack(*arrays),
                proposal,
                sts,
                tables,
                mask,
                sampling=shape.sampling,
                verify_tokens=shape.verify_tokens,
                logprobs=shape.logprobs,
                prompt_logprobs=shape.prompt_logprobs,
            )
            return *state, layout.pack(packet)

        def placement() -> Any:
            return jax.tree.map(lambda x: x.sharding, pools), *(self._replicated,) * 3

        call = (self._target, self._drafter, pools, slots, tables, args.arrays, proposal, self._sts, mask)
        return run, (2, 3, 4), placement, *call

    def _call(
        self, key: Any, function: Callable, donated: tuple[int, ...], placement: Callable, *args: Any
    ) -> Any:
        """Calls the program; `placement` of its results is asked for where it has to be compiled."""
        compiled = self._compiled.get(key) or self._ready(key, function, donated, placement, *args)
        return compiled(*args)

    def _ready(
        self, key: Any, function: Callable, donated: tuple[int, ...], placement: Callable, *args: Any
    ) -> Callable:
        """The compiled program, compiled here unless another thread is at it already."""
        while True:
            with self._lock:
                if key in self._compiled:
                    return self._compiled[key]
                other = self._under_way.get(key)
                if other is None:
                    self._under_way[key] = threading.Event()
                    break
            other.wait()
        started = time.perf_counter()
        try:
            with self._precision():
                program = jax.jit(function, donate_argnums=donated, out_shardings=placement())
                lowered = program.lower(*args)
                compiled = lowered.compile(self._options)
            seconds = time.perf_counter() - started
            with self._lock:
                if isinstance(key, ProposeShape):
                    self._proposals[key] = jax.tree.map(self._as_placed, lowered.out_info[0])
                self._compiled[key] = compiled
                while self.most is not None and len(self._compiled) > self.most:
                    self._compiled.pop(next(iter(self._compiled)))
                self.report.add(str(key), seconds)
        finally:
            with self._lock:
                self._under_way.pop(key).set()
        return compiled


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _problem(shape: VerifyShape, error: Exception) -> str:
    return (
        f"a program could not be compiled in the background ({type(error).__name__}: {error}); steps run larger "
        f"ones in its place, or compile it themselves ({shape})"
    )
