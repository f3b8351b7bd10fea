"""Which programs an engine should have before they are asked for, and making them ready at once.

Knows: the ladders of an engine, and what steps mostly ask for. Does not know: what compiles a server's, and when.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jspark.background import side_by_side
from jspark.shapes import VerifyShape, at_least, verify_ends
from jspark.step import Sampling

if TYPE_CHECKING:
    from jspark.engine import Engine

#: Greedy rows; sampled rows without a seed; and everything but what needs tables of its own.
_KINDS = (Sampling(), Sampling(sampled=True, rejection=True))
_EVERYTHING = Sampling(sampled=True, filtered=True, coupled=True, rejection=True)


def warm_set(engine: Engine) -> list[VerifyShape]:
    """Shapes to compile ahead, in this order.

    For greedy and for sampled rows, at every row bucket: whole windows, plain decoding, a prompt's first and last
    chunks, and chunks beside whole windows. Then the largest programs of all, which serve every step without
    penalties, biases, log-probabilities and grammars. Then the tiers between. Longer page tables and other chunk
    sizes are compiled when they are asked for; the largest programs run meanwhile.
    """
    arguments, config, size = engine.arguments, engine.config, engine.block_size
    compact = config.verify_mode == "compact"
    pages, chunks = arguments.page_steps, arguments.chunk_steps
    first = arguments.prefill_shape(chunks[0], alone=True)
    alone, several = (arguments.prefill_shape(chunks[-1], alone=alone) for alone in (True, False))
    common, between = [], []
    for kind in _KINDS:
        for rows in config.row_buckets:
            fewest, most = verify_ends(rows, size, engine.least_tokens)

            def shape(tokens, drafts, prefill, rows=rows, kind=kind):
                return VerifyShape(rows, pages[0], kind, tokens, drafts, prefill)

            drafting = [shape(most, True, None), shape(most, True, several)] if size else []
            common += [*drafting[:1], shape(fewest, False, None), shape(fewest, False, first)]
            common += [shape(fewest, False, alone), *drafting[1:]]
            tiers = [t for t in config.token_tiers if fewest < t < most] if compact and size else []
            between += [shape(t, True, None) for t in tiers]
    rows = config.row_buckets[-1]
    fewest, most = verify_ends(rows, size, engine.least_tokens)
    largest = [VerifyShape(rows, pages[-1], _EVERYTHING, fewest, False, several)]
    if size:
        largest.append(VerifyShape(rows, pages[-1], _EVERYTHING, most, True, several))
    return list(dict.fromkeys([*common, *largest, *between]))


def loop_set(engine: Engine, rows: int, sampling: Sampling) -> list[VerifyShape]:
    """All shapes that up to `rows` requests of one kind can need in an engine with `single_shapes`.

    Row buckets below that of `rows` are not among them.
    """
    arguments, config, size = engine.arguments, engine.config, engine.block_size
    rows = at_least(config.row_buckets, rows)
    chunk = arguments.chunk_steps[-1]
    prefills = dict.fromkeys([None, *(arguments.prefill_shape(chunk, alone=alone) for alone in (True, False))])
    fewest, most = verify_ends(rows, size, engine.least_tokens)
    tiers = {t for t in config.token_tiers if fewest <= t < most} if config.verify_mode == "compact" else set()
    wanted = [(fewest, False), *((t, True) for t in sorted({*tiers, most}) if size)]
    return [
        VerifyShape(rows, arguments.page_steps[-1], sampling, tokens, drafts, prefill)
        for tokens, drafts in wanted
        for prefill in prefills
    ]


def compile_now(wanted: Iterable[tuple[Engine, VerifyShape]]) -> None:
    """Makes programs ready, of several engines side by side."""
    side_by_side(lambda pair: pair[0].programs.compile(pair[1]), wanted)
