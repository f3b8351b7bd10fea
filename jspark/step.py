"""One decode step as pure functions: propose; then allocate, pack, target, accept, inject.

Knows: the order of the parts and what flows between them (docs/architecture.md, the data flow).
Does not know: shapes that exist (programs.py), requests (engine.py), or how any part works inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from jspark import eagle, kv
from jspark.accept import commit, judge, owners
from jspark.adjust import Tables, adjust, record
from jspark.allocate import allocate, survival
from jspark.batch import pack
from jspark.config import DecoderConfig, DrafterConfig, VerifyMode
from jspark.logprobs import logprobs as log_softmax_of
from jspark.logprobs import prompt_logprobs as log_softmax_of_prompt
from jspark.mask import Mask, cut, restrict
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.models.eagle3 import Eagle3
from jspark.models.layers import Vocabulary
from jspark.pallas.ragged_attention import REFERENCE, Attention
from jspark.propose import Proposal, inject, propose
from jspark.state import Packet, SlotTable, StepArgs
from jspark.verify import head, run_layers


@dataclass(frozen=True)
class Sampling:
    """Which sampling code a program carries: a program for greedy rows has no noise and keeps no q.

    penalties, steering: see adjust.py.
    """

    sampled: bool = False
    filtered: bool = False
    coupled: bool = False
    rejection: bool = False
    penalties: bool = False
    steering: bool = False

    @staticmethod
    @cache
    def of(traits: int) -> Sampling:
        """What the bits of `Request.traits` say."""
        return Sampling(*(bool(traits >> i & 1) for i in range(6)))


@dataclass(frozen=True)
class Spec:
    """What is fixed for the life of an engine and the same in all of its programs."""

    target: DecoderConfig
    drafter: DrafterConfig | None
    block_size: int
    verify_mode: VerifyMode
    page_size: int
    attention: Attention = REFERENCE

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads."""
        return () if self.drafter is None else self.drafter.target_layer_ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pools:
    """The KV pools of target and drafter; the same page numbers in both."""

    target: kv.Pool
    drafter: kv.Pool | None


def propose_step(
    spec: Spec,
    drafter: AnyDrafter,
    vocabulary: Vocabulary,
    pool: kv.Pool,
    slots: SlotTable,
    args: StepArgs,
    tables: Tables,
    *,
    sampling: Sampling,
) -> tuple[Proposal, kv.Pool | None]:
    """Drafts a block for every row of the step from the drafter's pool; reads no prefill rows of `args`.

    Returns the pool too where something was written (propose.block_hidden), else None.
    """
    assert spec.drafter is not None
    rows = slots.take(args)

    def as_target(logits: Float[Array, "r v"], drafts: list[Int[Array, " r"]]) -> Float[Array, "r v"]:
        count = logits.shape[0]
        adjusted = adjust(
            logits,
            jnp.arange(count, dtype=jnp.int32),
            jnp.full(count, len(drafts), jnp.int32),
            rows=rows.adjust,
            stop_ids=rows.stop_ids,
            position=rows.position,
            slot=args.slot,
            drafts=jnp.stack(drafts, axis=1) if drafts else jnp.zeros((count, 0), jnp.int32),
            tables=tables,
            penalties=sampling.penalties,
            steering=sampling.steering,
        )
        # A reduced draft vocabulary may hold forbidden tokens only; a draft that is refused is better than NaN.
        return jnp.where(jnp.max(adjusted, axis=-1, keepdims=True) > -jnp.inf, adjusted, logits)

    # The two kinds of drafters differ in what they start from.
    draft, start = (
        (partial(eagle.propose, drafter), rows.carried)
        if isinstance(drafter, Eagle3)
        else (partial(propose, drafter, attention=spec.attention.draft), rows.anchor)
    )
    assert start is not None
    return draft(
        vocabulary,
        spec.drafter,
        pool,
        start,
        rows.position,
        args.table,
        rows.sampling,
        block_size=spec.block_size,
        sampled=sampling.sampled,
        filtered=sampling.filtered,
        keep_q=sampling.rejection,
        adjust=as_target if sampling.penalties or sampling.steering else None,
    )


def verify_step(
    spec: Spec,
    target: Decoder,
    drafter: AnyDrafter | None,
    pools: Pools,
    slots: SlotTable,
    args: StepArgs,
    proposal: Proposal | None,
    temperatures: Float[Array, "2 g"] | None,
    tables: Tables,
    mask: Mask | None = None,
    *,
    sampling: Sampling,
    verify_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> tuple[Pools, SlotTable, Tables, Packet]:
    """Verifies the windows of all rows and runs the prefill rows, in one forward; commits what was accepted.

    `proposal` is None in a step that drafts nothing: every row then verifies its anchor alone.
    `temperatures`: sequential temperature scaling (STS), one a position, of greedy and of sampled rows; or None.
    `tables`: what adjust.py reads in programs with penalties or steering. `mask`: of the rows that have a grammar,
    if any has. `logprobs`, `prompt_logprobs`: how many of the likeliest tokens come back with each committed
    token, or prompt token of the step; None: no log-probabilities.
    """
    rows = slots.take(args)
    active = rows.live & args.decode
    count = args.slot.shape[0]
    if proposal is None:
        proposal = Proposal(tokens=jnp.zeros((count, 0), jnp.int32), confidence=jnp.zeros((count, 0)), log_q=None)
    block_size = proposal.tokens.shape[1]
    drafted = jnp.where(active & ~rows.fresh & rows.speculative, block_size, 0)

    # An illegal draft is certain to be refused, and whether it is sent makes no difference to what is committed.
    ceiling = drafted if mask is None else jnp.minimum(drafted, mask.legal)
    if block_size:
        if temperatures is not None:
            temperatures = temperatures[jnp.where(rows.sampling.greedy, 0, 1)]
        conditional, survive = survival(proposal.confidence, temperatures)
        window = allocate(
            survive,
            conditional,
            budget=args.budget,
            min_window=jnp.minimum(args.min_window, ceiling),
            max_window=jnp.minimum(args.max_window, ceiling),
            threshold=args.threshold,
        )
    else:
        window = jnp.zeros(count, jnp.int32)
    if spec.verify_mode == "static":
        window = drafted
    verified = drafted if spec.verify_mode == "cap-accept" else window

    batch = pack(
        jnp.concatenate([rows.anchor[:, None], proposal.tokens], axis=1),
        rows.position,
        verified,
        active,
        args.table,
        args.prefill,
        verify_tokens=verify_tokens,
        page_size=spec.page_size,
    )
    hidden, features, target_pool = run_layers(
        target,
        spec.target,
        pools.target,
        batch,
        feature_layers=spec.feature_layers,
        attention=spec.attention,
    )
    logits = head(target, hidden[:verify_tokens])
    row, offset = owners(batch.index, verify_tokens)
    adjusted = logits
    if sampling.penalties or sampling.steering:
        adjusted = adjust(
            logits,
            row,
            offset,
            rows=rows.adjust,
            stop_ids=rows.stop_ids,
            position=rows.position,
            slot=args.slot,
            drafts=proposal.tokens,
            tables=tables,
            penalties=sampling.penalties,
            steering=sampling.steering,
        )
    dead = None
    if mask is not None:
        adjusted, dead = restrict(adjusted, row, offset, mask)
    verdict = judge(
        adjusted,
        batch.index,
        proposal.tokens,
        proposal.log_q,
        window,
        verified,
        drafted,
        rows.sampling,
        rows.position,
        sampled=sampling.sampled,
        filtered=sampling.filtered,
        coupled=sampling.coupled,
        rejection=sampling.rejection,
    )
    ended = None
    if dead is not None:
        verdict, ended = cut(verdict, dead, batch.index)
    done = commit(
        verdict.tokens,
        verdict.count,
        remaining=rows.remaining,
        stop_ids=rows.stop_ids,
        active=active,
    )
    if ended is not None:
        done = replace(done, finished=done.finished | (active & ended))
    draft_pool, carried = pools.drafter, rows.carried
    if drafter is not None:
        assert spec.drafter is not None
        assert features is not None
        assert draft_pool is not None
        if isinstance(drafter, Eagle3):
            assert carried is not None
            assert rows.carried is not None
            view, committed = drafter.vocabulary(target.vocabulary), (done.tokens, done.count, args.prefill)
            draft_pool, new = eagle.inject(drafter, view, spec.drafter, draft_pool, features, batch, *committed)
            carried = jnp.where((done.count > 0)[:, None], new, carried)
        else:
            draft_pool = inject(drafter, spec.drafter, draft_pool, features, batch)

    last = jnp.take_along_axis(done.tokens, jnp.maximum(done.count - 1, 0)[:, None], axis=1)[:, 0]
    asked = asked_prompt = None
    if logprobs is not None:
        packed = log_softmax_of(logits, jnp.maximum(done.tokens[row, offset], 0), logprobs)
        here = jnp.minimum(batch.index, verify_tokens - 1)
        asked = jax.tree.map(lambda x: x[here], packed)
    if prompt_logprobs is not None:
        assert args.prefill is not None
        assert args.prefill.following is not None
        prompt = hidden[verify_tokens:], args.prefill.following
        asked_prompt = log_softmax_of_prompt(lambda x: head(target, x), *prompt, prompt_logprobs)

    after = replace(
        rows,
        anchor=jnp.where(done.count > 0, last, rows.anchor),
        position=rows.position + done.count,
        remaining=rows.remaining - done.count,
        live=rows.live & ~done.finished,
        fresh=rows.fresh & (done.count == 0),
        carried=carried,
    )
    packet = Packet(
        tokens=done.tokens,
        count=done.count,
        accepted=verdict.accepted,
        block_accepted=verdict.block_accepted,
        window=jnp.where(active, window, 0),
        finished=done.finished,
        confidence=proposal.confidence,
        logprobs=asked,
        prompt_logprobs=asked_prompt,
    )
    tables = record(tables, args.slot, done.tokens, done.count)
    return Pools(target_pool, draft_pool), slots.put(args.slot, after), tables, packet
