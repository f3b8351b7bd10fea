"""What an engine's sizes become on a device: block size, slots, pool, ladders.

Knows: the defaults, which sizes contradict each other, and which attention serves them. Does not know: how any of
it is used.
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jspark import kv
from jspark.config import DecoderConfig, DrafterConfig, EngineConfig, check_drafter_fits
from jspark.errors import UserError, warn
from jspark.pallas.ragged_attention import REFERENCE, Attention, HeadShape, choose_all
from jspark.shapes import ladder
from jspark.step import Spec

#: Drafted tokens of an EAGLE-3 chain at most: each is a forward of its own, compiled into one program.
MAX_CHAIN = 32


def run_time_block_size(config: EngineConfig, drafter: DrafterConfig | None, target: DecoderConfig) -> int:
    """γ of this engine: the checkpoint's or the smaller one asked for; 0 without a drafter.

    Raises:
        UserError: a block size without a drafter or above what the drafter can do, a drafter that does not fit.
    """
    if drafter is None:
        if config.block_size:
            raise UserError("a block size was given without a drafter; name a drafter or drop the block size")
        return 0
    check_drafter_fits(drafter, target)
    size = config.block_size or drafter.block_size
    if drafter.eagle3 is not None:
        if size > MAX_CHAIN:
            raise UserError(f"a chain of {size} drafted tokens was asked for; ask for {MAX_CHAIN} or less")
    elif size > drafter.block_size:
        raise UserError(
            f"block size {size} is larger than the {drafter.block_size} this drafter was trained for; "
            f"ask for {drafter.block_size} or less"
        )
    return size


def least_tokens(mesh: Mesh) -> int:
    """Packed rows below which a step gets no faster: XLA's products on GPUs are slower at 1 row than at 8."""
    return 1 if mesh.devices.flat[0].platform == "cpu" else 8


def attention(config: EngineConfig, spec: Spec, mesh: Mesh) -> Attention:
    """What computes attention on this mesh: kernels on one GPU, the XLA reference elsewhere.

    Raises:
        UserError: a backend was asked for that cannot serve this model here.
    """

    def heads(model: DecoderConfig) -> HeadShape:
        return HeadShape(model.num_heads, model.num_kv_heads, model.head_dim, config.page_size, config.dtype)

    if spec.drafter is not None and spec.drafter.eagle3 is not None:
        # Its chain attends in XLA, which wants rectangles and small page tables.
        if config.attention_backend not in ("auto", "xla"):
            raise UserError(
                f"the attention backend {config.attention_backend} does not serve EAGLE-3 drafters; "
                "choose auto or xla"
            )
        return REFERENCE
    several = mesh.devices.size > 1
    if several and config.attention_backend not in ("auto", "xla"):
        raise UserError(
            f"the attention backend {config.attention_backend} runs on one device and the mesh has "
            f"{mesh.devices.size}; choose auto or xla"
        )
    return choose_all(
        "xla" if several else config.attention_backend,
        mesh.devices.flat[0].platform,
        heads(spec.target),
        None if spec.drafter is None else heads(spec.drafter.backbone),
        width=spec.block_size + 1,
        chunk=config.chunked_prefill_size,
    )


def _room(mesh: Mesh) -> int:
    """Bytes that the KV pool may take on its own: half of what is free. UserError where a GPU does not say."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return 2**30
    memory = device.memory_stats()
    if memory is None:
        raise UserError("this device does not say how much memory is free; set max_total_tokens")
    return (memory["bytes_limit"] - memory["bytes_in_use"]) // 2


def sized(config: EngineConfig, spec: Spec, mesh: Mesh) -> EngineConfig:
    """`config` with everything chosen that was left to us: slots, context, pool, ladders.

    Raises:
        UserError: a context beyond the model's positions, or buckets too small for the slots.
    """
    device = mesh.devices.flat[0]
    gpu = device.platform != "cpu"
    slots = config.max_running_requests or (64 if gpu else 8)
    longest = spec.target.max_position
    context = config.context_length or longest
    if context > longest:
        raise UserError(f"a context of {context} is longer than the {longest} positions of this model; lower it")
    if spec.drafter is not None and context > (reach := spec.drafter.backbone.reach):
        warn(
            f"the drafter's positions reach {reach} tokens and the context holds {context}: drafts beyond are "
            f"worth little; lower the context length to {reach}, or take a drafter trained for longer contexts"
        )
    per_token = kv.bytes_per_token(spec.target, config.dtype)
    if spec.drafter is not None:
        per_token += kv.bytes_per_token(spec.drafter.backbone, config.dtype)
    tokens = config.max_total_tokens or min(slots * (context + spec.block_size), _room(mesh) // per_token)
    width = spec.block_size + 1
    # On a GPU a step of one row takes as long as one of eight: fewer programs serve all.
    fewest = slots if config.single_shapes else min(least_tokens(mesh), slots)
    rows = config.row_buckets or ladder(fewest, slots)
    if rows[-1] < slots:
        raise UserError(f"the largest row bucket {rows[-1]} is below max_running_requests {slots}; raise it")
    tiers = config.token_tiers or tuple(sorted({r * m for r in rows for m in (1, 2, 4, width)}))
    return replace(
        config,
        max_running_requests=slots,
        context_length=context,
        max_total_tokens=tokens,
        row_buckets=rows,
        token_tiers=tiers,
        # No step can prefill more than all slots hold.
        chunked_prefill_size=min(config.chunked_prefill_size, slots * context),
    )
