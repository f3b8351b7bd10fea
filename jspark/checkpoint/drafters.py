"""Drafter folders: a registry of dialects, each a recogniser, a reader of config.json and a table of names.

Knows: the DSpark of DeepSpec and SpecForge, z-lab's DFlash, both in the form of speculators; which of them
predict from the anchor row; where EAGLE-3's are read. Does not know: targets, or how a drafter computes.
Adding a dialect is one more entry in `DIALECTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Literal

from jspark.checkpoint import eagle3_dialects as eagle3
from jspark.checkpoint.draft_vocabulary import MASK
from jspark.checkpoint.hf_config import architectures, decoder_config
from jspark.checkpoint.settings import MAX_LAYERS, MAX_POSITION, Settings
from jspark.checkpoint.source import DECODER_RULES, TRANSPOSE, Rule, linear_rules, rule
from jspark.config import DrafterConfig
from jspark.errors import UserError

_MAX_BLOCK = 1 << 10
_MAX_LAYER_ID = 1 << 10
_PREFIX = r"(?:model\.)?"
_HEAD_PREFIX = r"(?:model\.|logit_head\.)?"


def _backbone_rules() -> Iterator[Rule]:
    yield rule(_PREFIX + r"fc\.weight", "fc.kernel", TRANSPOSE)
    yield rule(_PREFIX + r"hidden_norm\.weight", "hidden_norm.scale")
    yield rule(MASK, "vocab_mask")
    yield from DECODER_RULES


def _head_rules() -> Iterator[Rule]:
    yield rule(_HEAD_PREFIX + r"markov_head\.markov_w1\.weight", "markov.w1")
    yield rule(_HEAD_PREFIX + r"markov_head\.markov_w2\.weight", "markov.w2", TRANSPOSE)
    yield from linear_rules(_HEAD_PREFIX + r"markov_head\.gate_proj", "markov.gate")
    yield from linear_rules(_HEAD_PREFIX + r"markov_head\.joint_proj", "markov.joint")
    yield from linear_rules(_HEAD_PREFIX + r"confidence_head\.proj", "confidence")


@dataclass(frozen=True)
class Dialect:
    """One way of writing a drafter down.

    `read(config, anchor_predicts)` leaves what depends on the tensors to `with_tensors`. `ignored` are tensors
    of the target that some writers leave in the file.
    """

    name: str
    example: str
    matches: Callable[[Settings], bool]
    read: Callable[[Settings, bool | None], DrafterConfig]
    rules: tuple[Rule, ...]
    ignored: re.Pattern[str] = re.compile(r"(?!)")


def _read_deepspec(config: Settings, asked: bool | None) -> DrafterConfig:
    """Flat keys; γ = block_size, row 0 (the anchor) already predicts."""
    inner = _flat(config)
    return _drafter(config, inner, "deepspec", _anchor(inner, asked, True), _heads(inner))


def _read_specforge(config: Settings, asked: bool | None) -> DrafterConfig:
    """`dflash_config` or the same keys on the top level; otherwise as DeepSpec."""
    inner = _flat(config)
    _refuse_variants(inner)
    if inner.flag("use_swa", False):
        if not config.get("layer_types"):
            raise config.bad("layer_types", "a list that says which layers have the sliding window of use_swa")
        window = {
            "use_sliding_window": True,
            "sliding_window": inner.integer("swa_window_size", high=MAX_POSITION),
        }
        config = Settings({**config.values, **window}, config.origin)
    anchor = _anchor(inner, asked, True)
    return _drafter(config, inner, "specforge", anchor, _heads(inner, with_markov=True))


def _read_dflash(config: Settings, asked: bool | None) -> DrafterConfig:
    """`dflash_config` or the same keys on the top level; block_size counts the anchor."""
    inner = _flat(config)
    _refuse_variants(inner)
    if inner.flag("shift_label", False):
        raise inner.bad("shift_label", "false in a drafter without a head")
    ids = (
        _layer_ids(inner)
        if inner.get("target_layer_ids")
        else default_layer_ids(
            inner.integer("num_target_layers", low=4, high=_MAX_LAYER_ID),
            config.integer("num_hidden_layers", high=MAX_LAYERS),
        )
    )
    # The serving programs read a sliding layer as causal where nothing is said.
    causal = inner.flag(_causal_key(inner), True)
    return _drafter(config, inner, "z-lab", _anchor(inner, asked, False), _NO_HEADS, ids, causal_windows=causal)


def _read_speculators(config: Settings, asked: bool | None) -> DrafterConfig:
    """The backbone is in transformer_layer_config; layer ids count the embedding, so they are ours + 1."""
    kind = config.text("speculators_model_type")
    inner = config.section("speculators_config")
    if inner and inner.text("algorithm", kind) != kind:
        raise inner.bad("algorithm", f"{kind!r}, as speculators_model_type says")
    if config.text("projector_type", "dflash") != "dflash":
        raise config.bad("projector_type", "dflash")
    layers = config.section("transformer_layer_config")
    if layers is None:
        raise config.bad("transformer_layer_config", "an object")
    if kind == "dspark":
        anchor = _anchor(config, asked, None)
        heads = _heads(config, rank=256, confident=True, with_markov=True)
    else:
        # Files from before the key was there are all of the kind that does not predict.
        anchor, heads = _anchor(config, asked, False if asked is None else asked), _NO_HEADS
    ids = _layer_ids(config, "aux_hidden_state_layer_ids", 0)
    causal = not config.flag("sliding_window_non_causal", False)
    ids = tuple(i - 1 for i in ids)
    return _drafter(layers, config, "speculators", anchor, heads, ids, causal_windows=causal)


@dataclass(frozen=True)
class _Heads:
    markov: Literal["none", "vanilla", "gated", "rnn"] = "none"
    rank: int = 0
    confidence: Literal["none", "hidden", "hidden+markov"] = "none"


_NO_HEADS = _Heads()


def _heads(config: Settings, rank: int = 0, confident: bool = False, with_markov: bool = False) -> _Heads:
    """The heads in the keys that all DSpark dialects share; the other arguments are for absent keys."""
    rank = config.integer("markov_rank", rank, low=0)
    kind = config.text("markov_head_type", "vanilla") if rank else "none"
    if kind not in ("none", "vanilla", "gated", "rnn"):
        raise config.bad("markov_head_type", "vanilla, gated or rnn")
    if not config.flag("enable_confidence_head", confident):
        return _Heads(kind, rank)
    if not config.flag("confidence_head_with_markov", with_markov):
        return _Heads(kind, rank, "hidden")
    if kind == "none":
        raise config.bad("confidence_head_with_markov", "false where markov_rank is 0")
    return _Heads(kind, rank, "hidden+markov")


def _anchor(config: Settings, asked: bool | None, convention: bool | None) -> bool:
    """Whether row 0 predicts: sample_from_anchor, else the dialect's convention, else what the user said."""
    stated = convention if config.get("sample_from_anchor") is None else config.flag("sample_from_anchor")
    if stated is None:
        stated = asked
    if stated is None:
        raise UserError(
            f"{config.origin}: sample_from_anchor is missing, and such drafters were made both with and without "
            "a prediction from the anchor; pass --draft-anchor-predicts yes|no, whichever it was trained with"
        )
    if asked not in (None, stated):
        raise UserError(
            f"{config.origin}: this drafter {'predicts' if stated else 'does not predict'} from the anchor, "
            f"against --draft-anchor-predicts {'yes' if asked else 'no'}; drop the flag"
        )
    return stated


def _drafter(
    backbone: Settings,
    config: Settings,
    dialect: str,
    anchor: bool,
    heads: _Heads,
    ids: tuple[int, ...] | None = None,
    *,
    causal_windows: bool = False,
) -> DrafterConfig:
    """What all dialects have in common. block_size counts rows, of which the anchor's may not predict."""
    if heads.markov == "rnn" and not anchor:
        # Its state would have to take in the anchor's row, whose prediction is dropped.
        raise config.bad("markov_head_type", "vanilla or gated in a drafter that does not predict from the anchor")
    unused = 0 if anchor else 1
    decoder = decoder_config(backbone, "qwen3")
    if config.flag(_causal_key(config), False) and not (
        causal_windows and decoder.windows and all(decoder.windows)
    ):
        raise config.bad(_causal_key(config), "false: a block is causal in layers with a sliding window alone")
    return DrafterConfig(
        backbone=decoder,
        block_size=config.integer("block_size", low=1 + unused, high=_MAX_BLOCK) - unused,
        mask_token_id=config.integer("mask_token_id", low=0),
        target_layer_ids=_layer_ids(config) if ids is None else ids,
        predicts_from_anchor=anchor,
        markov=heads.markov,
        markov_rank=heads.rank,
        confidence=heads.confidence,
        causal_windows=causal_windows and bool(decoder.windows),
        dialect=dialect,
    )


def _refuse_variants(config: Settings) -> None:
    """UserError for drafters of the same name whose attention is another."""
    modes = config.get("attention_modes") or [config.get("attention_mode")]
    if not isinstance(modes, list) or any(mode not in (None, "gqa", "mha") for mode in modes):
        key = "attention_modes" if config.get("attention_modes") else "attention_mode"
        raise config.bad(key, "gqa or mha")


def _causal_key(config: Settings) -> str:
    return "is_causal" if config.get("is_causal") is not None else "causal"


def _flat(config: Settings) -> Settings:
    """`config` with the drafter's keys on the top level, wherever they are written.

    As SGLang ranks them: `dspark_` before a key, then dspark_config, dflash_config, and the top level.
    """
    values = dict(config.values)
    for key in ("dflash_config", "dspark_config"):
        if section := config.section(key):
            values |= {k: v for k, v in section.values.items() if v is not None}
    prefix = "dspark_"
    own = {k.removeprefix(prefix): v for k, v in config.values.items() if k.startswith(prefix)}
    own.pop("config", None)
    return Settings(values | {k: v for k, v in own.items() if v is not None}, config.origin)


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """DFlash's own choice where the file has none: rounded linspace from 1 to n − 3, one id a draft layer."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def _layer_ids(config: Settings, key: str = "target_layer_ids", low: int = -1) -> tuple[int, ...]:
    ids = config.integers(key, low, _MAX_LAYER_ID)
    if not ids:
        raise config.bad(key, "a list of target layers")
    return ids


def _projector(config: Settings) -> object:
    """The projector_type, before it is known whether anything else in `config` is right."""
    for key in ("dspark_config", "dflash_config"):
        nested = config.get(key)
        if isinstance(nested, dict) and nested.get("projector_type") is not None:
            return nested["projector_type"]
    return config.get("projector_type")


def _is_speculators(config: Settings) -> bool:
    return config.get("speculators_model_type") in ("dspark", "dflash")


def _is_deepspec(config: Settings) -> bool:
    return config.get("speculators_model_type") is None and "Qwen3DSparkModel" in architectures(config)


def _is_specforge(config: Settings) -> bool:
    """Its DSpark under its own name, or under DFlash's with the projector of DSpark."""
    if config.get("speculators_model_type") is not None:
        return False
    names, projector = architectures(config), _projector(config)
    own = "DSparkDraftModel" in names and projector in (None, "dspark")
    return own or ("DFlashDraftModel" in names and projector == "dspark")


def _is_dflash(config: Settings) -> bool:
    if config.get("speculators_model_type") is not None:
        return False
    return "DFlashDraftModel" in architectures(config) and _projector(config) in (None, "dflash")


_VERIFIER = re.compile(r"(?:model\.)?verifier_.*")
_DSPARK_RULES = (*_backbone_rules(), *_head_rules())

DIALECTS: tuple[Dialect, ...] = (
    Dialect("deepspec", "DeepSpec's Qwen3DSparkModel", _is_deepspec, _read_deepspec, _DSPARK_RULES),
    Dialect("specforge", "SpecForge's DSparkDraftModel", _is_specforge, _read_specforge, _DSPARK_RULES),
    Dialect("z-lab", "z-lab's DFlashDraftModel", _is_dflash, _read_dflash, tuple(_backbone_rules())),
    Dialect(
        "speculators",
        "speculators' dspark and dflash",
        _is_speculators,
        _read_speculators,
        _DSPARK_RULES,
        ignored=_VERIFIER,
    ),
    Dialect("deepspec", "DeepSpec's Qwen3Eagle3Model", eagle3.is_deepspec, eagle3.read_deepspec, eagle3.RULES),
    Dialect("eagle3", "LlamaForCausalLMEagle3", eagle3.is_original, eagle3.read_original, eagle3.RULES),
    Dialect(
        "speculators",
        "speculators' eagle3",
        eagle3.is_speculators,
        eagle3.read_speculators,
        eagle3.RULES,
        ignored=_VERIFIER,
    ),
)

#: Keys that only drafters have, for telling a drafter of an unknown dialect from a target.
_DRAFTER_KEYS = (
    "dflash_config",
    "dspark_config",
    "speculators_model_type",
    "target_layer_ids",
    "markov_rank",
    "eagle_config",
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
    for key, value in (
        ("speculators_model_type", config.get("speculators_model_type")),
        ("projector_type", _projector(config)),
    ):
        if value is not None:
            seen += f" with {key} {value!r}"
    known = ", ".join(d.example for d in DIALECTS[:-1]) + " and " + DIALECTS[-1].example
    return UserError(f"{config.origin}: {seen} is not a drafter dialect that can be read; supported are {known}")


def read_drafter(config: Settings, dialect: Dialect, anchor_predicts: bool | None) -> DrafterConfig:
    """The drafter in `config`, without what only its tensors tell."""
    drafter = dialect.read(config, anchor_predicts)
    if drafter.mask_token_id >= drafter.backbone.vocab_size:
        raise config.bad("mask_token_id", f"below the vocabulary size of {drafter.backbone.vocab_size}")
    return drafter


def with_tensors(drafter: DrafterConfig, paths: Set[str], draft_vocab_size: int) -> DrafterConfig:
    """`drafter` with what it has of its own, given the parameters that its file holds."""
    return replace(
        drafter,
        own_embedding="embed.embedding" in paths,
        own_head="head.kernel" in paths,
        draft_vocab_size=draft_vocab_size,
    )
