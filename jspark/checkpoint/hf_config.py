"""config.json of Hugging Face → DecoderConfig, in the spellings of transformers 4 and 5.

Knows: the defaults each architecture's config class has, which settings change the maths, and refuses those
this engine does not compute. Does not know: tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from jspark.checkpoint.settings import MAX_LAYERS, MAX_POSITION, MIN_FACTOR, Settings, check_heads
from jspark.config import DecoderConfig, RopeConfig
from jspark.errors import UserError

#: Architecture → model type, for targets.
TARGETS = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen3ForCausalLM": "qwen3"}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_QUANTISED_KEYS = ("quantization_config", "compression_config")


def target_model_type(config: Settings) -> str:
    """The model type of a target; UserError for an architecture that is not supported."""
    names = architectures(config)
    if not names and config.get("model_type") in TARGETS.values():
        return config.text("model_type")
    known = [TARGETS[name] for name in names if name in TARGETS]
    if not known:
        seen = ", ".join(names) or f"model_type {config.get('model_type')!r}"
        raise UserError(
            f"{config.origin}: the architecture {seen} is not supported; use one of {', '.join(TARGETS)}"
        )
    return known[0]


def architectures(config: Settings) -> tuple[str, ...]:
    """The architectures that config.json names."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise config.bad("architectures", "a list of names")
    return tuple(names)


def decoder_config(config: Settings, model_type: str, generation: Settings | None = None) -> DecoderConfig:
    """The decoder that `config` describes, with the end tokens of generation_config.json added.

    Raises UserError for missing keys, nonsense numbers and settings that are not supported.
    """
    _refuse_unsupported(config, model_type)
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    # Qwen3's config class has its own default; the others derive it.
    default_dim = 128 if model_type == "qwen3" else hidden // heads
    attention_bias = config.flag("attention_bias", False)
    vocab = config.integer("vocab_size")
    max_position = config.integer("max_position_embeddings", high=MAX_POSITION)
    sources = [config] + ([generation] if generation else [])
    decoder = DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", default_dim),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope_config(config, max_position, None if model_type == "qwen3" else 10_000.0),
        qk_norm=model_type == "qwen3",
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False) if model_type == "llama" else False,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        eos_token_ids=_distinct(i for s in sources for i in s.integers("eos_token_id", 0, vocab - 1)),
        model_type=model_type,
        windows=_windows(config, model_type),
    )
    return check_heads(decoder, config.origin)


def rope_config(config: Settings, max_position: int, default_theta: float | None) -> RopeConfig:
    """Rotary positions from `rope_parameters`, or from `rope_theta` and `rope_scaling`.

    The meaning of each field is that of transformers' rope utilities; `original_max_position` is
    max_position_embeddings where the file leaves it out.
    """
    scaling = config.section("rope_parameters") or config.section("rope_scaling") or Settings({}, config.origin)
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise UserError(
            f"{scaling.origin}: rotary positions that differ by layer are not supported; use another model"
        )
    theta_in = scaling if scaling.get("rope_theta") is not None else config
    theta = theta_in.number("rope_theta", default_theta, low=1.0)
    for place in (config, scaling):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(f"{place.origin}: partial rotary positions are not supported; use another model")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=scaling.number("factor", low=MIN_FACTOR))
    original = scaling.integer("original_max_position_embeddings", max_position, high=MAX_POSITION)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if low >= high:
            raise scaling.bad("low_freq_factor", f"below high_freq_factor ({high:g})")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=scaling.number("factor", low=MIN_FACTOR),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=original,
        )
    if kind == "yarn":
        given = scaling.get("attention_factor") is not None
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=scaling.number("factor", max_position / original, low=MIN_FACTOR),
            original_max_position=original,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            attention_factor=scaling.number("attention_factor") if given else None,
            mscale=scaling.number("mscale", 0.0, low=-1.0),
            mscale_all_dim=scaling.number("mscale_all_dim", 0.0, low=-1.0),
            truncate=scaling.flag("truncate", True),
        )
    raise UserError(
        f"{scaling.origin}: rotary positions of type {kind!r} are not supported; "
        "use a model with default, linear, llama3 or yarn"
    )


def _refuse_unsupported(config: Settings, model_type: str) -> None:
    def refuse(what: str) -> UserError:
        return UserError(f"{config.origin}: {what} not supported; use another checkpoint of this model")

    for key in _QUANTISED_KEYS:
        if config.get(key):
            raise refuse(f"quantised weights ({key}) are")
    for key in _EXPERT_KEYS:
        if config.integer(key, 0, low=0) > 1:
            raise refuse(f"mixtures of experts ({key}) are")
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise refuse(f"the activation {config.get('hidden_act')!r} is")
    known = {"full_attention"} if model_type == "llama" else {"full_attention", "sliding_attention"}
    odd = sorted({str(kind) for kind in _layer_types(config)} - known)
    if odd:
        raise refuse(f"layers of type {', '.join(odd)} are")
    if model_type == "llama" and config.flag("use_sliding_window", False):
        raise refuse("sliding-window attention in a Llama is")


def _layer_types(config: Settings) -> list:
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.bad("layer_types", "a list")
    return layer_types


def _windows(config: Settings, model_type: str) -> tuple[int, ...]:
    """The sliding window of every layer, as transformers' Qwen3 and Mistral read the keys; () where none has one.

    A query sees the keys less than a window before it, itself included.
    """
    if model_type == "llama":
        return ()
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    kinds = _layer_types(config)
    if kinds and len(kinds) != layers:
        raise config.bad("layer_types", f"a list of {layers} layers, as num_hidden_layers says")
    slides = [kind == "sliding_attention" for kind in kinds]
    if model_type == "mistral":
        # Its config class has a window of 4096 where the key is absent; only an explicit null turns it off.
        used = config.values.get("sliding_window", 4096) is not None and (not kinds or any(slides))
        slides = slides or [True] * layers
    else:
        used = config.flag("use_sliding_window", any(slides))
        if any(slides) and not used:
            raise config.bad("use_sliding_window", "true, as layer_types has layers of sliding_attention")
        slides = slides or [i >= config.integer("max_window_layers", 28, low=0) for i in range(layers)]
    if not used or not any(slides):
        return ()
    window = config.integer("sliding_window", 4096, high=MAX_POSITION)
    return tuple(window if slide else 0 for slide in slides)


def _distinct(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
