"""Plain facts about a checkpoint, for `jspark info`.

Knows: what is worth saying. Does not know: how it is printed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from jspark.checkpoint.checkpoint import (
    DrafterCheckpoint,
    TargetCheckpoint,
    Tensors,
    find,
    is_drafter,
    open_drafter,
    open_target,
)
from jspark.config import DecoderConfig, DrafterConfig, RopeConfig


def describe(
    spec: str, anchor_predicts: bool | None = None, revision: str | None = None, offline: bool = False
) -> dict[str, Any]:
    """Facts of the target or drafter that `spec` names, from headers alone: str, numbers, lists, dicts.

    The arguments, and what is raised, are those of `open_target` and `open_drafter`.
    """
    place = find(spec, revision, offline)
    return _drafter(open_drafter(place, anchor_predicts)) if is_drafter(place) else _target(open_target(place))


def _target(target: TargetCheckpoint) -> dict[str, Any]:
    tokenizer = target.tokenizer()
    return {
        "kind": "target",
        "name": target.name,
        "path": str(target.path),
        "format": target.format,
        **_decoder(target.config),
        **_contents(target.tensors),
        "eos_token_ids": list(target.config.eos_token_ids),
        "tokenizer": f"{tokenizer.vocab_size} tokens" if tokenizer else target.tokenizer_problem(),
        "chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }


def _drafter(drafter: DrafterCheckpoint) -> dict[str, Any]:
    config = drafter.config
    return {
        "kind": "drafter",
        "name": drafter.name,
        "path": str(drafter.path),
        "format": "safetensors",
        "dialect": config.dialect,
        "algorithm": _algorithm(config),
        **_decoder(config.backbone),
        **_contents(drafter.tensors),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.backbone.vocab_size,
        "target_layer_ids": list(config.target_layer_ids) or "chosen by the target",
        **(_block(config) if config.eagle3 is None else asdict(config.eagle3)),
        "own_embedding": config.own_embedding,
        "own_head": config.own_head,
    }


def _block(config: DrafterConfig) -> dict[str, Any]:
    return {
        "predicts_from_anchor": config.predicts_from_anchor,
        "mask_token_id": config.mask_token_id,
        "markov": config.markov,
        "markov_rank": config.markov_rank,
        "confidence": config.confidence,
    }


def _algorithm(config: DrafterConfig) -> str:
    if config.eagle3 is not None:
        return "EAGLE3"
    return "DFLASH" if config.markov == "none" and config.confidence == "none" else "DSPARK"


def _decoder(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architecture": config.model_type,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "tie_embeddings": config.tie_embeddings,
        "rope": _rope(config.rope),
        **({"sliding_windows": list(config.windows)} if config.windows else {}),
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    """Kind and theta, and of the rest what differs from the defaults."""
    plain = asdict(RopeConfig(kind=rope.kind, theta=rope.theta))
    return {k: v for k, v in asdict(rope).items() if k in ("kind", "theta") or v != plain[k]}


def _contents(tensors: Tensors) -> dict[str, Any]:
    """`dtypes`: element type or quantisation → parameters stored so; most first."""
    counts: Counter[str] = Counter()
    for name in {origin.name for origin in tensors.found.values()}:
        info = tensors.source.infos[name]
        counts[info.dtype] += math.prod(info.shape)
    return {"parameters": counts.total(), "dtypes": dict(counts.most_common())}
