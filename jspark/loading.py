"""From names to models on devices: which checkpoint, in which dtype, on which mesh, for which algorithm.

Knows: checkpoints and weights, and the choices that depend on the device.
Does not know: requests, text, or the engine's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jspark import axes, weights
from jspark.checkpoint import DrafterCheckpoint, open_drafter, open_target
from jspark.checkpoint.builtin import BUILTIN
from jspark.checkpoint.shipped import shipped_drafter
from jspark.config import (
    Algorithm,
    DecoderConfig,
    DrafterConfig,
    DType,
    LoadFormat,
    check_drafter_fits,
    with_layer_ids,
)
from jspark.errors import UserError
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.tokenizer import Tokenizer

#: The drafter's name that stands for random weights: the cost of a drafter without its use.
UNTRAINED = "untrained"


@dataclass(frozen=True)
class Target:
    """A target with its weights on the devices, to be shared by any number of LLMs.

    `tokenizer_problem` says why there is no tokenizer; None when there is one.
    """

    name: str
    config: DecoderConfig
    model: Decoder
    tokenizer: Tokenizer | None
    tokenizer_problem: str | None
    dtype: DType
    mesh: Mesh

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text ids of the model's configuration and of its tokenizer."""
        ours = self.tokenizer.eos_token_ids if self.tokenizer else ()
        return tuple(dict.fromkeys((*self.config.eos_token_ids, *ours)))

    def need_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; UserError that `what` cannot do without one, and why there is none."""
        if self.tokenizer is None:
            raise UserError(f"{what} needs a tokenizer: {self.tokenizer_problem}")
        return self.tokenizer

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text prompt, [] for an empty one."""
        tokenizer = self.need_tokenizer("a text prompt")
        return tokenizer.encode(_unicode(text)) if text else []

    def with_chat_template(self, source: str, origin: str) -> Target:
        """The same target with the template `source`, which `origin` names in messages."""
        tokenizer = self.need_tokenizer("a chat template")
        return replace(self, tokenizer=tokenizer.with_chat_template(source, origin))

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation ({"role": …, "content": …}) with the beginning of an answer.

        tools: JSON schemas of what the model may call. variables: further names for the template. Raises
        UserError where there is no chat template, or where it refuses the messages or ignores the tools.
        """
        tokenizer = self.need_tokenizer("a chat")
        good = not isinstance(messages, str | Mapping) and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
        )
        if not (good and messages):
            raise UserError('a chat is a list of at least one {"role": …, "content": …}; pass such a list')
        prompt = tokenizer.apply_chat_template(messages, tools, **variables)
        return tokenizer.encode(_unicode(prompt), add_special_tokens=False)


@dataclass(frozen=True)
class Draft:
    """A drafter that was found and not yet loaded; without a checkpoint it will be one of random weights.

    calibration: of its confidence, where it comes with the drafter.
    """

    algorithm: Algorithm
    checkpoint: DrafterCheckpoint | None
    calibration: Path | None = None

    @property
    def name(self) -> str:
        """Of the checkpoint; a name of its own for random weights."""
        return self.checkpoint.name if self.checkpoint else UNTRAINED


def find_drafter(
    spec: str | None,
    algorithm: Algorithm | None,
    anchor_predicts: bool | None = None,
    revision: str | None = None,
    offline: bool = False,
    *,
    target: str = "",
) -> Draft | None:
    """The drafter in a folder or on the Hub, from headers alone, or the untrained one; None without one.

    algorithm: what the user asked for, None for whatever the drafter is. target: its name; a built-in one may have
    a drafter of this package, which stands in where an algorithm is asked for and no drafter is named. The rest is
    `open_drafter`'s. Raises
    UserError when they contradict each other.
    """
    if revision is not None and spec in (None, UNTRAINED):
        raise UserError("a revision of the drafter was given without a drafter of the Hub; name one, or drop it")
    if anchor_predicts is not None and spec in (None, UNTRAINED):
        raise UserError(
            "whether the anchor predicts was given without a drafter's folder; name a folder, or drop "
            "draft_anchor_predicts"
        )
    if algorithm is not None and algorithm not in get_args(Algorithm):
        raise UserError(f"the algorithm is {algorithm!r}; it must be {', '.join(get_args(Algorithm))}")
    shipped = shipped_drafter(target, algorithm) if spec is None and algorithm and target in BUILTIN else None
    if shipped is not None and algorithm is not None:
        return Draft(algorithm, open_drafter(str(shipped.folder)), shipped.calibration)
    if spec is None:
        if algorithm in ("DFLASH", "DSPARK", "EAGLE3"):
            raise UserError(f"{algorithm} needs a drafter; name one, or choose the algorithm NONE")
        return None
    if algorithm == "NONE":
        raise UserError("the algorithm NONE uses no drafter and one was named; drop one of the two")
    if spec == UNTRAINED:
        if algorithm not in (None, "DSPARK"):
            raise UserError(
                f"the untrained drafter is a DSpark one; choose DSPARK, or name a drafter for {algorithm}"
            )
        return Draft("DSPARK", None)
    checkpoint = open_drafter(spec, anchor_predicts, revision, offline)
    possible = algorithms(checkpoint.config)
    if algorithm is not None and algorithm not in possible:
        raise UserError(
            f"{checkpoint.path} is a {possible[0]} drafter, not {algorithm}; choose {possible[0]} "
            "or another drafter"
        )
    return Draft(algorithm or possible[0], checkpoint)


def load_target(
    spec: str,
    dtype: DType | None = None,
    mesh: Mesh | None = None,
    *,
    draft: Draft | None = None,
    revision: str | None = None,
    offline: bool = False,
    load_format: LoadFormat = "auto",
    scanned: bool = False,
) -> Target:
    """The target that `spec` names, its weights on `mesh` (one device by default).

    dtype: None is float32 on the CPU and bfloat16 elsewhere. draft: refused before any weights are read where
    it was made for another target. revision, offline: see `checkpoint.find`. load_format: "dummy" takes random
    weights, so that a folder with config.json will do. scanned: for training, see weights.py.
    Raises UserError for what cannot be loaded.
    """
    if dtype not in (None, *get_args(DType)):
        raise UserError(f"dtype is {dtype!r}; it must be {' or '.join(get_args(DType))}")
    if load_format not in get_args(LoadFormat):
        raise UserError(f"load_format is {load_format!r}; it must be {' or '.join(get_args(LoadFormat))}")
    dummy = load_format == "dummy"
    checkpoint = open_target(spec, revision, offline, weights=not dummy)
    if draft and draft.checkpoint:
        check_drafter_fits(draft.checkpoint.config, checkpoint.config)
        if draft.checkpoint.verifier:
            draft.checkpoint.verifier.compare(checkpoint.name, checkpoint.config)
    mesh = mesh or _default_mesh()
    if dtype is None:
        dtype = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    config = checkpoint.config
    return Target(
        name=checkpoint.name,
        config=config,
        model=weights.random_decoder(config, jnp.dtype(dtype), mesh, scanned=scanned)
        if dummy
        else weights.load_decoder(checkpoint, config, jnp.dtype(dtype), mesh, scanned=scanned),
        tokenizer=checkpoint.tokenizer(),
        tokenizer_problem=checkpoint.tokenizer_problem(),
        dtype=dtype,
        mesh=mesh,
    )


def load_drafter(draft: Draft, target: Target, seed: int = 0) -> tuple[AnyDrafter, DrafterConfig]:
    """The drafter beside its target. seed: of the untrained one. Raises UserError where the two do not fit."""
    dtype = jnp.dtype(target.dtype)
    if draft.checkpoint is None:
        config = weights.untrained_drafter_config(target.config)
        return weights.random_drafter(config, dtype, target.mesh, seed), config
    config = with_layer_ids(draft.checkpoint.config, target.config)
    check_drafter_fits(config, target.config)
    return weights.load_drafter(draft.checkpoint, config, dtype, target.mesh, target.model), config


def algorithms(config: DrafterConfig) -> tuple[Algorithm, ...]:
    """The names that fit a drafter, its own first. DSpark without any head is DFlash in DSpark's layout: both."""
    if config.eagle3 is not None:
        return ("EAGLE3",)
    if config.markov != "none" or config.confidence != "none":
        return ("DSPARK",)
    return ("DSPARK", "DFLASH") if config.predicts_from_anchor else ("DFLASH",)


def _unicode(text: str) -> str:
    """`text`, unless it holds half a character, as an argument of broken bytes does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the prompt is not valid Unicode; pass it as UTF-8") from None
    return text


def _default_mesh() -> Mesh:
    try:
        device = jax.devices()[0]
    except (RuntimeError, AssertionError):  # the latter where JAX_PLATFORMS names a platform without a plugin
        raise UserError("JAX finds no device to run on; check JAX_PLATFORMS, the driver and JAX itself") from None
    return axes.single_device_mesh(device)
