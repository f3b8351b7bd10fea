"""Drafter folders: a registry of dialects, each a recogniser, a reader of config.json and a table of names.

Knows: DeepSpec's DSpark and z-lab's DFlash. Does not know: targets, or how a drafter computes.
Adding a dialect is one more entry in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace

from jspark.checkpoint.hf_config import architectures, decoder_config
from jspark.checkpoint.settings import Settings
from jspark.checkpoint.source import DECODER_RULES, TRANSPOSE, Rule, linear_rules, rule
from jspark.config import DrafterConfig
from jspark.errors import UserError

_MAX_BLOCK = 1 << 10
_MAX_LAYER_ID = 1 << 10
_PREFIX = r"(?:model\.)?"


def _backbone_rules() -> Iterator[Rule]:
    yield rule(_PREFIX + r"fc\.weight", "fc.kernel", TRANSPOSE)
    yield rule(_PREFIX + r"hidden_norm\.weight", "hidden_norm.scale")
    yield from DECODER_RULES


def _head_rules() -> Iterator[Rule]:
    yield rule(_PREFIX + r"markov_head\.markov_w1\.weight", "markov.w1")
    yield rule(_PREFIX + r"markov_head\.markov_w2\.weight", "markov.w2", TRANSPOSE)
    yield from linear_rules(_PREFIX + r"markov_head\.gate_proj", "markov.gate")
    yield from linear_rules(_PREFIX + r"markov_head\.joint_proj", "markov.joint")
    yield from linear_rules(_PREFIX + r"confidence_head\.proj", "confidence")


@dataclass(frozen=True)
class Dialect:
    """One way of writing a drafter down. `read` leaves own_embedding and own_head to `drafter_config`."""

    name: str
    example: str
    matches: Callable[[Settings], bool]
    read: Callable[[Settings], DrafterConfig]
    rules: tuple[Rule, ...]


def _read_deepspec(config: Settings) -> DrafterConfig:
    """Flat keys; γ = block_size, row 0 (the anchor) already predicts."""
    rank = config.integer("markov_rank", 0, low=0)
    kind = config.text("markov_head_type", "vanilla") if rank else "none"
    if kind not in ("none", "vanilla", "gated", "rnn"):
        raise config.bad("markov_head_type", "vanilla, gated or rnn")
    confidence = "none"
    if config.flag("enable_confidence_head", False):
        confidence = "hidden+markov" if config.flag("confidence_head_with_markov", False) else "hidden"
    if confidence == "hidden+markov" and kind == "none":
        raise config.bad("confidence_head_with_markov", "false where markov_rank is 0")
    return DrafterConfig(
        backbone=decoder_config(config, "qwen3"),
        block_size=config.integer("block_size", high=_MAX_BLOCK),
        mask_token_id=config.integer("mask_token_id", low=0),
        target_layer_ids=_layer_ids(config),
        predicts_from_anchor=True,
        markov=kind,
        markov_rank=rank,
        confidence=confidence,
        dialect="deepspec",
    )


def _read_dflash(config: Settings) -> DrafterConfig:
    """`dflash_config` or the same keys on the top level; block_size counts the anchor."""
    nested = config.section("dflash_config")
    inner = Settings({**config.values, **_present(nested)}, config.origin)
    backbone = decoder_config(config, "qwen3")
    ids = (
        _layer_ids(inner)
        if inner.get("target_layer_ids")
        else default_layer_ids(inner.integer("num_target_layers", low=4, high=_MAX_LAYER_ID), backbone.num_layers)
    )
    return DrafterConfig(
        backbone=backbone,
        block_size=inner.integer("block_size", low=2, high=_MAX_BLOCK) - 1,
        mask_token_id=inner.integer("mask_token_id", low=0),
        target_layer_ids=ids,
        predicts_from_anchor=False,
        dialect="z-lab",
    )


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """DFlash's own choice where the file has none: rounded linspace from 1 to n − 3, one id a draft layer."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def _present(section: Settings | None) -> dict[str, object]:
    return {k: v for k, v in section.values.items() if v is not None} if section else {}


def _layer_ids(config: Settings) -> tuple[int, ...]:
    ids = config.integers("target_layer_ids", -1, _MAX_LAYER_ID)
    if not ids:
        raise config.bad("target_layer_ids", "a list of target layers")
    return ids


def _is_dflash(config: Settings) -> bool:
    nested = config.values.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    return "DFlashDraftModel" in architectures(config) and projector in (None, "dflash")


DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        "deepspec",
        "DeepSpec's Qwen3DSparkModel",
        lambda config: "Qwen3DSparkModel" in architectures(config),
        _read_deepspec,
        (*_backbone_rules(), *_head_rules()),
    ),
    Dialect(
        "z-lab",
        "z-lab's DFlashDraftModel",
        _is_dflash,
        _read_dflash,
        tuple(_backbone_rules()),
    ),
)

#: Keys that only drafters have, for telling a drafter of an unknown dialect from a target.
_DRAFTER_KEYS = (
    "dflash_config",
    "dspark_config",
    "speculators_model_type",
    "target_layer_ids",
    "markov_rank",
)


def find_dialect(config: Settings) -> Dialect | None:
    """The dialect that `config` is written in."""
    return next((d for d in DIALECTS if d.matches(config)), None)


def looks_like_drafter(config: Settings) -> bool:
    """True for every known dialect and for what has a key that only drafters have."""
    return find_dialect(config) is not None or any(config.get(key) is not None for key in _DRAFTER_KEYS)


def unknown_dialect(config: Settings) -> UserError:
    """The error for a config.json that no dialect recognises."""
    seen = ", ".join(architectures(config)) or f"model_type {config.get('model_type')!r}"
    known = " and ".join(d.example for d in DIALECTS)
    return UserError(f"{config.origin}: {seen} is not a drafter dialect that can be read; supported are {known}")


def drafter_config(config: Settings, dialect: Dialect, paths: Set[str]) -> DrafterConfig:
    """The drafter in `config`; `paths` are the parameters that its file holds."""
    drafter = dialect.read(config)
    if drafter.mask_token_id >= drafter.backbone.vocab_size:
        raise config.bad("mask_token_id", f"below the vocabulary size of {drafter.backbone.vocab_size}")
    return replace(drafter, own_embedding="embed.embedding" in paths, own_head="head.kernel" in paths)
