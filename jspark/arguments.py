"""What the host sends with a step, and with new requests: NumPy arrays, packed into few buffers.

Knows: which arrays a program reads and how rows, page tables and prompt chunks fill them; the ladders of page
counts and chunk sizes.
Does not know: what a step should do (scheduler.py, planner.py), or programs (engine.py hands the arrays over).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jspark.budget import Plan
from jspark.config import EngineConfig
from jspark.packing import Layout
from jspark.pallas.ragged_attention import Segments, Tiles
from jspark.scheduler import Chunk, Running, Scheduler, Work
from jspark.shapes import VerifyShape, at_least, ladder
from jspark.state import SLOT, PackedArgs, Prefill, StepArgs
from jspark.step import Spec

#: Rows of a prefill tile in the attention fallback, when several prompts share a chunk.
TILE = 32

#: Prefill rows, tiles and rows of a tile: what a program with chunks is made for. Kernels have no tiles.
PrefillShape = tuple[int, int, int]


class Arguments:
    """Builds the arguments of programs from planned work."""

    def __init__(self, config: EngineConfig, spec: Spec, scheduler: Scheduler):
        self._scheduler = scheduler
        self._block_size, self._kernels = spec.block_size, spec.attention.kernels
        #: Whether every chunk brings the token after each of its rows along.
        self._chain = spec.drafter is not None and spec.drafter.eagle3 is not None
        self._vocab_size = spec.target.vocab_size
        self._dummy = config.max_running_requests
        most_pages, chunk = scheduler.table.shape[1], config.chunked_prefill_size
        self.tile = min(TILE, chunk)
        # The reference gathers whole tables; a kernel reads only what it needs of one.
        widest = config.single_shapes or self._kernels
        self.page_steps = ladder(most_pages if widest else max(1, 256 // config.page_size), most_pages)
        self.chunk_steps = ladder(chunk if config.single_shapes else self.tile, chunk)
        self.most_tiles = self._tiles(self.chunk_steps[-1])
        self._step_layouts: dict[int, Layout[StepArgs]] = {}
        self._prefill_layouts: dict[Any, Layout[Prefill]] = {}

    def pages(self, tokens: int) -> int:
        """Columns of the page tables of a program whose rows hold up to `tokens` tokens."""
        return at_least(self.page_steps, self._scheduler.allocator.pages_for(tokens))

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────

    def wanted(self, work: Work) -> tuple[int, PrefillShape | None]:
        """The page count that the step's rows look at, and the shape of its prefill rows."""
        return at_least(self.page_steps, work.pages), self._prefill_shape(work.chunks)

    def step(self, work: Work, shape: VerifyShape, plan: Plan) -> PackedArgs:
        """Arguments of a step in programs of that shape, which serves it."""
        decode = len(work.decode)
        packed = self.blank(shape)
        words: Any = packed.words
        args = packed.layout.view(words)
        args.slot[: len(work.slots)] = work.slots
        args.decode[:decode] = 1
        # The slots' state is the host's until the first tokens are on their way.
        new = [i for i, running in enumerate(work.rows) if running.fresh]
        if new:
            args.new[new] = 1
            slots = SLOT.view(args.entry)
            for i in new:
                self._fill(i, work.rows[i], slots)
        args.budget[()], args.threshold[()] = plan.budget, plan.threshold
        args.min_window[:decode] = plan.min_window
        if plan.max_window is not None:
            args.max_window[:decode] = plan.max_window
        if work.chunks:
            assert packed.prefill_layout is not None
            prefill: Any = packed.prefill
            self._fill_chunks(packed.prefill_layout.view(prefill), work, shape.verify_tokens)
        return replace(packed, table=self._scheduler.table[args.slot, : shape.pages])

    def _fill(self, i: int, running: Running, values: Any) -> None:
        """State `i` of the slots; an idle slot's values are in it, so what is off stays as it is."""
        request, params = running.request, running.request.params
        known = len(running.tokens)
        values.anchor[i], values.position[i] = running.tokens[-1], known - 1
        values.remaining[i] = running.limit - (known - len(request.prompt))
        values.live[i] = values.fresh[i] = 1
        values.speculative[i] = params.speculative
        if request.stop_ids:
            values.stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        if running.sampled:
            s = values.sampling
            s.temperature[i], s.seed[i], s.coupled[i] = params.temperature, running.seed, params.coupled
            if params.filtered:
                s.top_k[i] = min(max(params.top_k, 0), self._vocab_size)
                s.top_p[i], s.min_p[i] = params.top_p, params.min_p
        a = values.adjust
        if params.penalized:
            a.repetition[i], a.presence[i] = params.repetition_penalty, params.presence_penalty
            a.frequency[i] = params.frequency_penalty
        if request.steered:
            a.min_position[i] = len(request.prompt) + params.min_tokens if params.min_tokens else 0
            a.biased[i], a.worded[i] = bool(params.logit_bias or request.bad_words), bool(request.bad_words)

    def blank(self, shape: VerifyShape) -> PackedArgs:
        """Arguments of a step that does nothing."""
        layout = self._step_layouts.get(shape.rows)
        if layout is None:
            layout = self._step_layouts[shape.rows] = self._step_layout(shape.rows)
        table: Any = np.zeros((shape.rows, shape.pages), np.int32)
        words: Any = layout.blank()
        if shape.prefill is None:
            return PackedArgs(words, table, None, layout, None)
        key = shape.prefill, shape.rows, shape.verify_tokens, self._chain or shape.prompt_logprobs is not None
        prefill = self._prefill_layouts.get(key)
        if prefill is None:
            prefill = self._prefill_layouts[key] = self._prefill_layout(*key)
        rows: Any = prefill.blank()
        return PackedArgs(words, table, rows, layout, prefill)

    def _step_layout(self, count: int) -> Layout[StepArgs]:
        fields: dict[str, Any] = {
            "slot": np.full(count, self._dummy, np.int32),
            "decode": np.zeros(count, bool),
            "new": np.zeros(count, bool),
            "entry": SLOT.blank(count),
            "budget": np.zeros((), np.int32),
            "threshold": np.zeros((), np.float32),
            "min_window": np.zeros(count, np.int32),
            "max_window": np.full(count, self._block_size, np.int32),
        }
        return Layout(StepArgs(**fields, table=None, prefill=None))  # type: ignore[arg-type]

    def _tiles(self, tokens: int) -> int:
        """Tiles of a program with so many prefill rows: twice what they fill, since prompts end inside tiles."""
        return 2 * -(-tokens // self.tile)

    def _prefill_shape(self, chunks: Sequence[Chunk]) -> PrefillShape | None:
        if not chunks:
            return None
        sizes = [c.stop - c.start for c in chunks]
        needed = sum(-(-size // self.tile) for size in sizes)
        # Many short prompts need more tiles than their tokens alone would.
        enough = (s for s in self.chunk_steps if self._kernels or self._tiles(s) >= needed)
        total = next(s for s in enough if s >= sum(sizes))
        # One prompt: its pages are gathered once, not once a tile.
        return self.prefill_shape(total, alone=len(chunks) == 1)

    def prefill_shape(self, total: int, alone: bool) -> PrefillShape:
        """The shape of `total` prefill rows, of one prompt or of several."""
        if self._kernels:
            return total, 0, 0
        return (total, 1, total) if alone and total > self.tile else (total, self._tiles(total), self.tile)

    def _prefill_layout(
        self, shape: PrefillShape, count: int, verify_tokens: int, following: bool
    ) -> Layout[Prefill]:
        total, tiles, tile = shape

        def ints(*shape: int) -> Any:
            return np.zeros(shape, np.int32)

        rectangles = segments = None
        if self._kernels:
            segments = Segments(start=ints(count + 1), row=ints(count), length=ints(count), max_rows=total)
        else:
            rectangles = Tiles(index=ints(tiles, tile) + verify_tokens + total, row=ints(tiles))
        row: Any = np.full(total, count, np.int32)
        more = ints(total) if following else None
        return Layout(Prefill(ints(total), ints(total), row, rectangles, segments, more))

    def _fill_chunks(self, prefill: Any, work: Work, verify_tokens: int) -> None:
        chunks: list[Chunk] = work.chunks
        sizes = [c.stop - c.start for c in chunks]
        rows = [work.rows.index(c.running) for c in chunks]
        ends = np.cumsum(sizes)
        for chunk, r, end in zip(chunks, rows, ends, strict=True):
            where = slice(end - (chunk.stop - chunk.start), end)
            prefill.tokens[where] = chunk.running.tokens[chunk.start : chunk.stop]
            prefill.positions[where] = np.arange(chunk.start, chunk.stop)
            prefill.row[where] = r
            if prefill.following is not None:
                prefill.following[where] = chunk.running.tokens[chunk.start + 1 : chunk.stop + 1]
        if prefill.segments is not None:
            s, n = prefill.segments, len(chunks)
            s.start[1 : n + 1], s.start[n + 1 :] = ends, ends[-1]
            s.row[:n], s.length[:n] = rows, [c.stop for c in chunks]
            return
        index, tile_row = prefill.tiles.index, prefill.tiles.row
        tile, used = index.shape[1], 0
        for size, r, end in zip(sizes, rows, ends, strict=True):
            for first in range(0, size, tile):
                here = min(tile, size - first)
                index[used, :here] = verify_tokens + end - size + first + np.arange(here)
                tile_row[used] = r
                used += 1
