"""What a training step takes and where its time goes: tokens/s, and the share of the device's matrix rate.

Knows: target shapes, the parts of a step as programs of their own, and how they are timed. Does not know: how a
step is computed (train/). Weights and text are random; the arithmetic is that of a real run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from matplotlib.axes import Axes

from jspark.bench import ceilings, report
from jspark.config import DecoderConfig, DType, RopeConfig
from jspark.loading import Target
from jspark.train import arms, objective
from jspark.train.attention import implementation
from jspark.train.blocks import block_hidden
from jspark.train.config import TrainConfig
from jspark.train.loop import compiled_step
from jspark.train.pipeline import Batch
from jspark.train.step import first_state, optimiser, place_batch
from jspark.train.teacher import choose_anchors, teach
from jspark.weights import random_decoder


def _decoder(vocab, hidden, inter, layers, heads, kv, dim, theta, qk_norm) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        rms_norm_eps=1e-6,
        max_position=8192,
        rope=RopeConfig(theta=theta),
        qk_norm=qk_norm,
        tie_embeddings=True,
    )


#: Targets by name; `tiny` is for trying the benchmark on a CPU.
SHAPES: dict[str, DecoderConfig] = {
    "smollm2-135m": _decoder(49_152, 576, 1536, 30, 9, 3, 64, 100_000.0, False),
    "qwen3-4b": _decoder(151_936, 2560, 9728, 36, 32, 8, 128, 1_000_000.0, True),
    "tiny": _decoder(512, 64, 128, 6, 4, 2, 16, 10_000.0, True),
}


@dataclass(frozen=True)
class Settings:
    """What is measured. repeats: timed steps; their median counts."""

    shape: str
    train: TrainConfig
    dtype: DType
    repeats: int = 10


def measure(settings: Settings, mesh: Mesh) -> dict[str, Any]:
    """Times of a step and of its parts, and rates. The parts are programs of their own: they need not sum up."""
    target_config = SHAPES[settings.shape]
    dtype = jnp.dtype(settings.dtype)
    config = replace(settings.train, dtype=settings.dtype)
    target = Target(
        name=settings.shape,
        config=target_config,
        model=random_decoder(target_config, dtype, mesh, scanned=True),
        tokenizer=None,
        tokenizer_problem="random weights have none",
        dtype=settings.dtype,
        mesh=mesh,
    )
    arm = arms.make(config, target, mesh)
    transform = optimiser(config, 1000)
    state = first_state(arm.trainee.initial, transform, mesh)
    started = time.perf_counter()
    step = compiled_step(arm, config, target, transform, state, mesh)
    compile_seconds = time.perf_counter() - started
    batch = place_batch(_random_batch(config, target_config), mesh)
    times = []
    for _ in range(settings.repeats + 2):
        started = time.perf_counter()
        state, figures = step(state, target.model, batch)
        jax.block_until_ready(figures)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[2:])
    rate = ceilings.matmul_rate(mesh, settings.dtype) * mesh.devices.size
    tokens = config.batch_size * config.sequence_length
    floor = arm.flops / rate
    memory = mesh.devices.flat[0].memory_stats() or {}
    out = {
        "shape": settings.shape,
        "algorithm": config.drafter.algorithm,
        "devices": mesh.devices.size,
        "tokens_a_step": tokens,
        "blocks_a_step": config.batch_size * config.anchors,
        "step_seconds": seconds,
        "step_seconds_spread": [min(times[2:]), max(times[2:])],
        "tokens_per_second": tokens / seconds,
        "flops_a_step": arm.flops,
        "matmul_rate": rate,
        "floor_seconds": floor,
        "model_flop_utilisation": floor / seconds,
        "compile_seconds": compile_seconds,
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }
    if config.drafter.algorithm != "EAGLE3" and config.accumulate == 1:
        out["parts"] = _parts(config, target, arm, batch, settings.repeats)
    return out


def _parts(config: TrainConfig, target: Target, arm: arms.Arm, batch: Batch, repeats: int) -> dict[str, float]:
    """Seconds of the target's forward, and with gradients of the drafter's layers and of the vocabulary losses."""
    dtype = jnp.dtype(config.dtype)
    drafter = config.drafter.config(target.config)
    how = implementation(target.mesh.devices.flat[0], config.dtype)
    model = arm.trainee.module(arm.trainee.initial, dtype)
    decoder = target.model
    teacher = jax.jit(lambda d, b: teach(d, target.config, b, drafter.target_layer_ids, how))
    features, taught = teacher(decoder, batch)
    anchors, keep = jax.jit(choose_anchors, static_argnums=2)(jax.random.key(0), batch, config.anchors)

    def backbone(model, decoder, batch, features, anchors):
        hidden = block_hidden(model, decoder.embed, drafter, batch, features, anchors, how, remat=config.remat)
        return jnp.sum(hidden.astype(jnp.float32)), hidden

    layers = jax.jit(jax.value_and_grad(backbone, has_aux=True))
    (_, hidden), _ = layers(model, decoder, batch, features, anchors)
    blocks = jax.jit(
        lambda h, t, b, a, k: objective.gather_blocks(h, t, b.tokens, b.mask, a, k, config.loss.decay)
    )(hidden, taught, batch, anchors, keep)
    heads = objective.Heads(model.markov, model.confidence)

    def losses(heads, hidden, blocks, decoder):
        head = decoder.vocabulary.head
        with_markov = drafter.confidence == "hidden+markov"
        own = replace(blocks, hidden=hidden)
        total, _ = objective.summed_loss(
            heads, own, head, head, config.loss, with_markov=with_markov, chunk=config.chunk
        )
        return total

    vocabulary = jax.jit(jax.value_and_grad(losses, argnums=(0, 1)))
    return {
        "target_forward": _median(lambda: teacher(decoder, batch), repeats),
        "drafter_layers": _median(lambda: layers(model, decoder, batch, features, anchors), repeats),
        "vocabulary_losses": _median(lambda: vocabulary(heads, blocks.hidden, blocks, decoder), repeats),
    }


def _median(call: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _random_batch(config: TrainConfig, target: DecoderConfig) -> Batch:
    """Three conversations a sequence, two thirds of each an answer."""
    rng = np.random.default_rng(0)
    shape = (config.batch_size, config.sequence_length)
    third = -(-config.sequence_length // 3)
    place = np.broadcast_to(np.arange(config.sequence_length, dtype=np.int32), shape)
    fields: dict[str, Any] = {
        "tokens": rng.integers(0, target.vocab_size, shape, np.int32),
        "positions": place % third,
        "segments": place // third + 1,
        "mask": place % third >= third // 3,
    }
    return Batch(**fields)


def show(results: Sequence[dict[str, Any]]) -> None:
    """One line a shape, and the parts."""
    rows = [
        (
            f"{r['shape']} {r['algorithm']}",
            f"{r['step_seconds'] * 1e3:.1f}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['floor_seconds'] * 1e3:.1f}",
            f"{r['model_flop_utilisation']:.1%}",
            "  ".join(f"{k.replace('_', ' ')} {v * 1e3:.1f}" for k, v in r.get("parts", {}).items()),
        )
        for r in results
    ]
    header = ("drafter for", "ms a step", "tokens/s", "floor ms", "utilisation", "parts, ms")
    report.show("training step", header, rows, ("floor: the operations of the step at the measured matrix rate",))


def draw(results: Sequence[dict[str, Any]], axes: Axes) -> None:
    """Parts of each step beside the floor."""
    names = [f"{r['shape']}\n{r['algorithm']}" for r in results]
    axes.barh(names, [r["step_seconds"] * 1e3 for r in results], color="#9ecae1", label="whole step")
    for r, name in zip(results, names, strict=True):
        left = 0.0
        for part, colour in zip(r.get("parts", {}).values(), ("#08519c", "#3182bd", "#6baed6"), strict=False):
            axes.barh([name], [part * 1e3], left=left, height=0.4, color=colour)
            left += part * 1e3
        axes.plot([r["floor_seconds"] * 1e3] * 2, [name, name], marker="|", markersize=40, color="#de2d26")
    axes.set_xlabel("ms a step; inside: target, drafter layers, vocabulary; red: floor")
    axes.invert_yaxis()
