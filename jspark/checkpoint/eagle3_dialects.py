"""EAGLE-3 drafters on disk: keys and names of DeepSpec, of speculators, and of the original, which SGLang reads.

Knows: how each writes a chain drafter down. Does not know: other drafters (drafters.py lists all dialects), or
targets: where a file leaves the layers it reads to the target, so does the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jspark.checkpoint.draft_vocabulary import MASK
from jspark.checkpoint.hf_config import architectures, decoder_config
from jspark.checkpoint.settings import Settings
from jspark.checkpoint.source import DECODER_RULES, LINEARS, NORMS, TRANSPOSE, Rule, linear_rules, rule
from jspark.config import DrafterConfig, Eagle3Config
from jspark.errors import UserError

_MAX_LAYER_ID = 1 << 10
_MAX_CHAIN = 1 << 10
#: Drafted tokens a step where the file does not say for how many it was trained: what SGLang starts with.
_CHAIN = 5
_ORIGINAL = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def _rules() -> Iterator[Rule]:
    yield rule(r"(?:model\.)?fc\.weight", "fc.kernel", TRANSPOSE)
    yield rule(r"(?:model\.)?input_norm\.weight", "input_norm.scale")
    yield rule(r"(?:model\.)?fc_norm\.(\d+)\.weight", r"fc_norm.\1.scale")
    yield rule(r"(?:model\.)?layers\.(\d+)\.hidden_norm\.weight", r"layers.\1.hidden_norm.scale")
    yield rule(MASK, "vocab_mask")
    yield from DECODER_RULES
    # The original's only layer has a name of its own.
    middle = r"(?:model\.)?midlayer\."
    yield rule(middle + r"hidden_norm\.weight", "layers.0.hidden_norm.scale")
    for theirs, ours in LINEARS.items():
        yield from linear_rules(middle + re.escape(theirs), "layers.0." + ours)
    for theirs, ours in NORMS.items():
        yield rule(middle + re.escape(theirs) + r"\.weight", f"layers.0.{ours}.scale")


RULES = tuple(_rules())


def is_deepspec(config: Settings) -> bool:
    """DeepSpec's Qwen3Eagle3Model."""
    return config.get("speculators_model_type") is None and "Qwen3Eagle3Model" in architectures(config)


def is_speculators(config: Settings) -> bool:
    """speculators' eagle3."""
    return config.get("speculators_model_type") == "eagle3"


def is_original(config: Settings) -> bool:
    """The form that EAGLE-3 was released in, as SafeAILab and SpecForge write it."""
    return config.get("speculators_model_type") is None and any(n in _ORIGINAL for n in architectures(config))


def read_deepspec(config: Settings, asked: bool | None) -> DrafterConfig:
    """Flat keys; layer ids as ours; the chain of training is ttt_length long."""
    if config.integer("draft_num_hidden_layers", 1) != 1:
        raise config.bad("draft_num_hidden_layers", "1, as DeepSpec itself drafts with one layer only")
    ids = config.integers("target_layer_ids", 0, _MAX_LAYER_ID)
    if not ids:
        raise config.bad("target_layer_ids", "a list of target layers")
    length = config.integer("ttt_length", 7, high=_MAX_CHAIN)
    return _drafter(config, config, "qwen3", "deepspec", ids, length, Eagle3Config(), asked)


def read_speculators(config: Settings, asked: bool | None) -> DrafterConfig:
    """The layers are in transformer_layer_config; layer ids count the embedding, so they are ours + 1."""
    layers = config.section("transformer_layer_config")
    if layers is None:
        raise config.bad("transformer_layer_config", "an object")
    inner = config.section("speculators_config")
    if inner and inner.text("algorithm", "eagle3") != "eagle3":
        raise inner.bad("algorithm", "'eagle3', as speculators_model_type says")
    ids = config.integers("eagle_aux_hidden_state_layer_ids", 0, _MAX_LAYER_ID)
    kind = Eagle3Config(
        norm_before_residual=config.flag("norm_before_residual", False),
        norm_before_fc=config.flag("norm_before_fc", False),
        fc_norm=config.flag("fc_norm", False),
        norm_output=config.flag("norm_output", False),
    )
    return _drafter(
        layers,
        config,
        layers.text("model_type", "llama"),
        "speculators",
        tuple(i - 1 for i in ids),
        _proposed(inner) or _CHAIN,
        kind,
        asked,
    )


def read_original(config: Settings, asked: bool | None) -> DrafterConfig:
    """Flat keys; layer ids, if any, in eagle_config and as ours."""
    inner = config.section("eagle_config")
    if inner and not inner.flag("use_aux_hidden_state", True):
        raise inner.bad("use_aux_hidden_state", "true: features of one layer are EAGLE's first form")
    ids = inner.integers("eagle_aux_hidden_state_layer_ids", 0, _MAX_LAYER_ID) if inner else ()

    return _drafter(config, config, "llama", "eagle3", ids, _CHAIN, Eagle3Config(), asked)


def _proposed(inner: Settings | None) -> int | None:
    """Tokens that speculators itself would draft with its default method."""
    methods = (inner and inner.get("proposal_methods")) or []
    if not isinstance(methods, list) or not all(isinstance(m, dict) for m in methods):
        raise UserError(f"{inner and inner.origin}: proposal_methods must be a list of objects; correct it")
    if not inner or not methods:
        return None
    return Settings(methods[0], inner.origin).integer("speculative_tokens", _CHAIN, high=_MAX_CHAIN)


def _drafter(
    layers: Settings,
    config: Settings,
    model_type: str,
    dialect: str,
    ids: tuple[int, ...],
    length: int,
    kind: Eagle3Config,
    asked: bool | None,
) -> DrafterConfig:
    if asked is not None:
        raise UserError(
            f"{config.origin}: an EAGLE-3 drafter has no anchor row that could predict or not; "
            "drop --draft-anchor-predicts"
        )
    if model_type not in ("llama", "qwen3"):
        raise layers.bad("model_type", "llama or qwen3")
    backbone = decoder_config(layers, model_type)
    size = config.integer("target_hidden_size", backbone.hidden_size)
    if size != backbone.hidden_size:
        raise config.bad("target_hidden_size", f"{backbone.hidden_size}, as the drafter's own hidden size is")
    return DrafterConfig(
        backbone=backbone,
        block_size=length,
        mask_token_id=0,
        target_layer_ids=ids,
        predicts_from_anchor=True,
        eagle3=kind,
        dialect=dialect,
    )
