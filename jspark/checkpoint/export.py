"""Drafters → folders that other programs read: config.json and model.safetensors.

Knows: which dialect can express which drafter, its keys and names, and how a folder appears whole or not at all.
Does not know: how the keys are read back (drafters.py, hf_config.py).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jspark import weights
from jspark.checkpoint import int8
from jspark.checkpoint.checkpoint import DrafterCheckpoint
from jspark.checkpoint.source import LINEARS, NORMS
from jspark.config import DecoderConfig, DrafterConfig, DType, Eagle3Config, RopeConfig
from jspark.errors import UserError
from jspark.models.any_drafter import AnyDrafter

#: Element types that files can have.
StoredType = Literal["float32", "bfloat16", "int8"]
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
#: Parameter → tensor, and whether it is a kernel [in, out] that files hold as [out, in].
_NAMES = {
    "fc.kernel": ("fc.weight", True),
    "hidden_norm.scale": ("hidden_norm.weight", False),
    "norm.scale": ("norm.weight", False),
    "embed.embedding": ("embed_tokens.weight", False),
    "head.kernel": ("lm_head.weight", True),
    "markov.w1": ("markov_head.markov_w1.weight", False),
    "markov.w2": ("markov_head.markov_w2.weight", True),
    "markov.gate.kernel": ("markov_head.gate_proj.weight", True),
    "markov.gate.bias": ("markov_head.gate_proj.bias", False),
    "markov.joint.kernel": ("markov_head.joint_proj.weight", True),
    "markov.joint.bias": ("markov_head.joint_proj.bias", False),
    "confidence.kernel": ("confidence_head.proj.weight", True),
    "confidence.bias": ("confidence_head.proj.bias", False),
}
_LAYER_NAMES = {
    **{f"{ours}.kernel": (f"{theirs}.weight", True) for theirs, ours in LINEARS.items()},
    **{f"{ours}.bias": (f"{theirs}.bias", False) for theirs, ours in LINEARS.items()},
    **{f"{ours}.scale": (f"{theirs}.weight", False) for theirs, ours in NORMS.items()},
    "hidden_norm.scale": ("hidden_norm.weight", False),
}


def export_drafter(
    drafter: DrafterCheckpoint | tuple[AnyDrafter, DrafterConfig],
    folder: Path,
    *,
    dtype: StoredType | None = None,
    overwrite: bool = False,
) -> DrafterConfig:
    """Writes a drafter to `folder` and returns the configuration that opening it will give.

    The dialect is DeepSpec's, and z-lab's for a DFlash drafter that does not predict from its anchor, which
    DeepSpec's form cannot say. A drafter on devices is written without what it shares with its target. dtype:
    as it is when None; int8 is read by this project only. overwrite: may replace a drafter in `folder`. The folder
    appears whole or not at all.

    Raises:
        UserError: neither dialect can express the drafter, or the folder is in use or cannot be written.
    """
    if isinstance(drafter, DrafterCheckpoint):
        config, target_layers = drafter.config, drafter.target_layers
    else:
        model, config = drafter
        target_layers = 0
        config = replace(config, own_embedding=model.embed is not None, own_head=model.head is not None)
    config = replace(config, dialect=_dialect(config))
    _check_free(folder, overwrite)
    arrays = (
        drafter.parameters(weights.drafter_shapes(config))
        if isinstance(drafter, DrafterCheckpoint)
        else ((name, np.asarray(value)) for name, value in weights.parameters(drafter[0]))
    )
    tensors = _tensors(arrays, None if dtype == "int8" else dtype)
    values = _config(config, target_layers, str(tensors[_NAMES["fc.kernel"][0]].dtype))
    if dtype == "int8":
        tensors, values = int8.quantised(tensors), values | int8.marker()
    _write(folder, values, tensors)
    return config


def _dialect(config: DrafterConfig) -> str:
    def refuse(what: str) -> UserError:
        return UserError(f"the drafter {what}, which no dialect that can be written can say; keep it as it is")

    b = config.backbone
    if config.draft_vocab_size:
        raise refuse(f"drafts only {config.draft_vocab_size} of {b.vocab_size} tokens")
    if not b.qk_norm or b.mlp_bias or b.qkv_bias != b.output_bias:
        raise refuse("has layers of another kind than Qwen3's")
    if config.eagle3 is not None:
        if config.eagle3 != Eagle3Config() or b.num_layers != 1:
            raise refuse("is an EAGLE-3 with more norms or layers than DeepSpec's")
        if len(config.target_layer_ids) != 5:
            raise refuse(f"is an EAGLE-3 that reads {config.feature_count} target layers and not five")
        return "deepspec"
    if config.predicts_from_anchor and config.causal_windows:
        raise refuse("has sliding windows that are causal inside the block")
    if config.predicts_from_anchor:
        return "deepspec"
    if config.markov != "none" or config.confidence != "none":
        raise refuse("has heads and does not predict from its anchor")
    return "z-lab"


def _config(config: DrafterConfig, target_layers: int, dtype: str) -> dict[str, Any]:
    values = _backbone(config.backbone) | {"dtype": dtype}
    if target_layers:
        values["num_target_layers"] = target_layers
    if config.eagle3 is not None:
        return values | {
            "architectures": ["Qwen3Eagle3Model"],
            "draft_num_hidden_layers": 1,
            "target_layer_ids": list(config.target_layer_ids),
            "ttt_length": config.block_size,
        }
    block: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.dialect == "z-lab":
        if config.backbone.windows and not config.causal_windows:
            block["causal"] = False
        return values | {
            "architectures": ["DFlashDraftModel"],
            "block_size": config.block_rows,
            "dflash_config": block,
        }
    return values | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        **block,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla" if config.markov == "none" else config.markov,
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "hidden+markov",
    }


def _backbone(b: DecoderConfig) -> dict[str, Any]:
    rope = _rope(b.rope)
    return {
        "model_type": "qwen3",
        "vocab_size": b.vocab_size,
        "hidden_size": b.hidden_size,
        "intermediate_size": b.intermediate_size,
        "num_hidden_layers": b.num_layers,
        "num_attention_heads": b.num_heads,
        "num_key_value_heads": b.num_kv_heads,
        "head_dim": b.head_dim,
        "rms_norm_eps": b.rms_norm_eps,
        "max_position_embeddings": b.max_position,
        # Twice, for transformers 5 and 4.
        "rope_parameters": {"rope_theta": b.rope.theta, **rope},
        "rope_theta": b.rope.theta,
        "rope_scaling": None if b.rope.kind == "default" else rope,
        "attention_bias": b.qkv_bias,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention" if b.window(i) else "full_attention" for i in range(b.num_layers)],
        "use_sliding_window": bool(b.windows),
        "sliding_window": max(b.windows, default=None),
        "tie_word_embeddings": b.tie_embeddings,
        "eos_token_id": list(b.eos_token_ids) or None,
    }


def _rope(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind == "default":
        return values
    values["factor"] = rope.factor
    if rope.kind == "linear":
        return values
    values["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        return values | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    optional = {
        "attention_factor": rope.attention_factor,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }
    return values | {key: value for key, value in optional.items() if value}


def _tensors(arrays: Iterable[tuple[str, np.ndarray]], dtype: DType | None) -> dict[str, np.ndarray]:
    tensors = {}
    for path, array in arrays:
        name, transposed = _name(path)
        # The file is written from memory order, so transposed views must be laid out anew.
        tensors[name] = np.ascontiguousarray(array.T if transposed else array, dtype and np.dtype(dtype))
    return tensors


def _name(path: str) -> tuple[str, bool]:
    if match := re.fullmatch(r"(layers\.\d+\.)(.*)", path):
        name, transposed = _LAYER_NAMES[match[2]]
        return match[1] + name, transposed
    return _NAMES[path]


def _check_free(folder: Path, overwrite: bool) -> None:
    """UserError unless `folder` is absent, empty, or a drafter's and nothing else's with leave to replace it."""
    try:
        held = {p.name for p in folder.iterdir()}
    except FileNotFoundError:
        held = set()
    except (OSError, ValueError) as e:
        raise UserError(f"{folder} cannot be written to ({_why(e)}); name another folder") from None
    if held and not overwrite:
        raise UserError(f"{folder} is not empty; name another folder, or allow overwriting it")
    if not held <= {_CONFIG, _WEIGHTS}:
        other = min(held - {_CONFIG, _WEIGHTS})
        raise UserError(f"{folder} holds more than a drafter ({other}) and is not replaced; name another folder")


def _write(folder: Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as staging:
            made = Path(staging) / "new"
            made.mkdir()
            save_file(tensors, made / _WEIGHTS, metadata={"format": "pt"})
            (made / _CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            # safetensors makes it for this user alone.
            (made / _WEIGHTS).chmod((made / _CONFIG).stat().st_mode)
            _replace(folder, made, Path(staging) / "old")
    except (OSError, SafetensorError) as e:
        raise UserError(
            f"{folder} cannot be written ({_why(e)}); name another folder or free some space"
        ) from None


def _replace(folder: Path, made: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    try:
        made.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise


def _why(e: Exception) -> object:
    return e.strerror or e if isinstance(e, OSError) else e
