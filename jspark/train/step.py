"""One training step: a pure function of the state, the frozen target and a batch.

Knows: what is trainable, precision (bfloat16 compute, float32 master weights), gradient accumulation, the
optimiser, randomness as a function of (seed, step), and placement on a mesh of any number of devices.
Does not know: files, progress, or what the losses mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspark.config import DecoderConfig, DrafterConfig
from jspark.models.any_drafter import AnyDrafter
from jspark.models.decoder import Decoder
from jspark.models.eagle3 import Eagle3
from jspark.train import objective
from jspark.train.attention import Implementation
from jspark.train.blocks import block_hidden
from jspark.train.chains import chain_hidden
from jspark.train.config import TrainConfig
from jspark.train.pipeline import Batch
from jspark.train.teacher import choose_anchors, teach

Params = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes. params: float32 by name. step: batches seen, which is also the position in the data
    and the counter of all randomness."""

    step: Array
    params: Params
    optimizer: Any


class Trainee:
    """A drafter as named float32 arrays, and back as a module in any dtype."""

    def __init__(self, drafter: Any):
        flat, self._tree = jax.tree_util.tree_flatten_with_path(drafter)
        self.names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
        self.initial: Params = dict(zip(self.names, (leaf for _, leaf in flat), strict=True))

    def module(self, params: Params, dtype) -> Any:
        """The drafter of these values."""
        return jax.tree.unflatten(self._tree, [params[n].astype(dtype) for n in self.names])


#: (drafter, frozen target, batch, anchors, which of them are real) → the summed loss, and sums for the figures.
LossFunction = Callable[[Any, Decoder, Batch, Array, Array], tuple[Array, dict[str, Array]]]


def drafter_loss(
    config: TrainConfig, drafter: DrafterConfig, target: DecoderConfig, how: Implementation
) -> LossFunction:
    """The summed loss of a drafter on a batch, and its sums."""

    def loss(model: AnyDrafter, decoder: Decoder, batch: Batch, anchors: Array, keep: Array):
        features, taught = teach(decoder, target, batch, drafter.target_layer_ids, how)
        vocabulary = decoder.vocabulary
        if isinstance(model, Eagle3):
            hidden = chain_hidden(model, vocabulary.embed, drafter, batch, features, anchors, how)
            heads = objective.Heads(None, None)
        else:
            hidden = block_hidden(
                model, vocabulary.embed, drafter, batch, features, anchors, how, remat=config.remat
            )
            heads = objective.Heads(model.markov, model.confidence)
        # A block may not run over the end of its answer: the engine would have stopped there.
        blocks = objective.gather_blocks(
            hidden, taught, batch.tokens, batch.mask, anchors, keep, config.loss.decay
        )
        return objective.summed_loss(
            heads,
            blocks,
            vocabulary.head,
            vocabulary.head,
            config.loss,
            with_markov=drafter.confidence == "hidden+markov",
            chunk=config.chunk,
        )

    return loss


def optimiser(config: TrainConfig, steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm: linear warm-up, then a cosine to the final rate."""
    warmup = max(1, round(config.warmup * steps))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(steps, warmup + 1), config.final_learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_decayed),
    )


def _decayed(params: Params) -> dict[str, bool]:
    """Matrices decay, norms and biases do not."""
    return {name: not name.endswith(("scale", "bias")) for name in params}


def first_state(params: Params, transform: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step, the same on every device; `params` stay the caller's."""
    params = jax.tree.map(jnp.copy, params)
    with jax.numpy_dtype_promotion("standard"):
        state = TrainState(jnp.zeros((), jnp.int32), params, transform.init(params))
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def make_step(
    config: TrainConfig,
    trainee: Trainee,
    loss: LossFunction,
    transform: optax.GradientTransformation,
) -> Callable[[TrainState, Decoder, Batch], tuple[TrainState, dict[str, Array]]]:
    """The step to be compiled: (state, frozen target, batch of [a·b, s]) → (state, figures). The state may be
    donated.

    Gradients of the parts are summed and divided by the weight of all of them: cutting a batch changes rounding
    only.
    """
    dtype = jnp.dtype(config.dtype)
    parts = config.accumulate

    def part(params: Params, decoder: Decoder, batch: Batch, anchors: Array, keep: Array):
        def own(params: Params):
            return loss(trainee.module(params, dtype), decoder, batch, anchors, keep)

        (total, sums), gradient = jax.value_and_grad(own, has_aux=True)(params)
        return gradient, sums | {"total": total}

    def step(state: TrainState, decoder: Decoder, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        pieces = (batch, *choose_anchors(key, batch, config.anchors))
        if parts == 1:
            gradient, sums = part(state.params, decoder, *pieces)
        else:
            # Every part takes rows from all over the batch, hence from every device.
            cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), pieces)

            def add(carry, piece):
                return jax.tree.map(jnp.add, carry, part(state.params, decoder, *piece)), None

            first = jax.tree.map(lambda x: x[0], cut)
            shapes = jax.eval_shape(lambda: part(state.params, decoder, *first))
            zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            (gradient, sums), _ = jax.lax.scan(add, zero, cut)
        weight = jnp.maximum(sums["weight"], 1e-6)
        gradient = jax.tree.map(lambda g: g / weight, gradient)
        with jax.numpy_dtype_promotion("standard"):
            norm = optax.tree.norm(gradient)
            updates, optimizer = transform.update(gradient, state.optimizer, state.params)
            params: Any = optax.apply_updates(state.params, updates)
        out = objective.figures(sums, config.loss)
        out |= {"loss": sums["total"] / weight, "gradient_norm": norm, "blocks": sums["blocks"]}
        out["tokens"] = jnp.sum(batch.segments > 0).astype(jnp.float32)
        return TrainState(state.step + 1, params, optimizer), out

    return step


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A host batch on the mesh, its sequences spread over the data axis."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
