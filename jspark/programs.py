"""The compiled programs of an engine, by shape: what stands in the place of CUDA-graph tiers.

Knows: the ladders of row buckets, token tiers and page counts; compilation and its cost; donation.
Does not know: requests, or which program a step needs (engine.py decides).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspark.adjust import Tables, write_row
from jspark.checkpoint.cache import cache_dir, make_folder
from jspark.mask import Mask
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.propose import Proposal
from jspark.state import PackedArgs, PackedPacket, SlotTable, admit, packet_layout
from jspark.step import Pools, Sampling, Spec, propose_step, verify_step


@dataclass(frozen=True)
class ProposeShape:
    """Key of a propose program."""

    rows: int
    pages: int
    sampling: Sampling


@dataclass(frozen=True)
class VerifyShape:
    """Key of a verify program; drafts: there is a proposal; prefill: chunk rows and the shape of their tiles.

    logprobs, prompt_logprobs: see verify_step. masked: rows of the grammar mask, 0 without one.
    """

    rows: int
    pages: int
    sampling: Sampling
    verify_tokens: int
    drafts: bool
    prefill: tuple[int, int, int] | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    masked: int = 0


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """Powers of two times `smallest` below `largest`, then `largest`."""
    steps = []
    while smallest < largest:
        steps.append(smallest)
        smallest *= 2
    return (*steps, largest)


def at_least(steps: tuple[int, ...], wanted: int) -> int:
    """The smallest step that holds `wanted`."""
    return next(s for s in steps if s >= wanted)


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


class Programs:
    """Compiles on first use and calls. Pools and slots are donated: the caller must use what comes back."""

    def __init__(
        self, spec: Spec, target: Decoder, drafter: AnyDrafter | None, mesh: Mesh, sts: np.ndarray | None = None
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
        exact = self._target[0].dtype == jnp.float32
        gpu = mesh.devices.flat[0].platform != "cpu"
        # XLA tunes a Triton kernel for every product, minutes a program; cuBLAS has them ready.
        self._options: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False} if gpu else {}
        # float32 means float32: without this a GPU multiplies in tf32.
        self._precision = partial(jax.default_matmul_precision, "highest") if exact else contextlib.nullcontext

    def place(self, host: Any) -> Any:
        """Host arrays on every device of the mesh."""
        return jax.device_put(host, self._replicated)

    def send(self, host: Any) -> Any:
        """Host arrays for a program's arguments: one device takes NumPy's with the call, which is quicker."""
        return self.place(host) if self.mesh.size > 1 else host

    def admit(self, slots: SlotTable, entries: np.ndarray) -> SlotTable:
        """Writes new requests into the slot table (donated)."""
        return self._call(("admit", len(entries)), admit, (0,), self._replicated, slots, self.send(entries))

    def write_row(self, tables: Tables, slot: Array, row: Tables) -> Tables:
        """Writes a new request's entries into the tables (donated)."""
        key = ("row", jax.tree.structure(tables))
        return self._call(key, write_row, (0,), self._replicated, tables, slot, row)

    def propose(
        self, shape: ProposeShape, pools: Pools, slots: SlotTable, args: PackedArgs, tables: Tables
    ) -> Proposal:
        """Drafts for the rows of a step; reads the drafter's pool."""

        def run(leaves, vocabulary, pool, slots, words, table, tables):
            drafter = jax.tree.unflatten(self._drafter_tree, leaves)
            view = jax.tree.unflatten(self._vocabulary_tree, vocabulary)
            slot = args.unpack(words, table, None).slot
            call = (self.spec, drafter, view, pool, slots, slot, table, tables)
            return propose_step(*call, sampling=shape.sampling)

        call = (self._drafter, self._vocabulary, pools.drafter, slots, args.words, args.table, tables)
        return self._call(shape, run, (), self._replicated, *call)

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
        size = self.spec.block_size if shape.drafts else 0
        prefill = shape.prefill[0] if shape.prefill else 0
        layout = packet_layout(shape.rows, size, shape.logprobs, shape.prompt_logprobs, prefill)

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

        placement = (jax.tree.map(lambda x: x.sharding, pools), *(self._replicated,) * 3)
        call = (self._target, self._drafter, pools, slots, tables, args.arrays, proposal, self._sts, mask)
        *state, words = self._call(shape, run, (2, 3, 4), placement, *call)
        return *state, PackedPacket(words, layout)

    def _call(self, key: Any, function: Callable, donated: tuple[int, ...], placement: Any, *args: Any) -> Any:
        compiled = self._compiled.get(key)
        if compiled is None:
            started = time.perf_counter()
            with self._precision():
                program = jax.jit(function, donate_argnums=donated, out_shardings=placement)
                compiled = self._compiled[key] = program.lower(*args).compile(self._options)
            seconds = time.perf_counter() - started
            self.report.programs += 1
            self.report.seconds += seconds
            self.report.by_shape[str(key)] = seconds
        return compiled(*args)
