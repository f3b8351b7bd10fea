"""Weights on the devices: checkpoint tensors (or random numbers) into modules, placed once, in one dtype.

Knows: how a module's parameters map to checkpoint names in either layer layout, and where they are placed.
Does not know: file formats (checkpoint/), or what the modules compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jspark import axes
from jspark.config import DecoderConfig, DrafterConfig, RopeConfig
from jspark.models.any_drafter import AnyDrafter, build_drafter
from jspark.models.decoder import Decoder


class TensorSource(Protocol):
    """Anything that yields named parameters: a checkpoint, or a test's dictionary."""

    def parameters(self, expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, array) for every expected name, after checking names and shapes."""
        ...


def stacked_layout(mesh: Mesh) -> bool:
    """GPUs read stacked layers (few arguments), CPUs one array a layer (faster products)."""
    return mesh.devices.flat[0].platform != "cpu"


def load_decoder(source: TensorSource, config: DecoderConfig, dtype, mesh: Mesh) -> Decoder:
    """A target with its weights on the mesh."""
    stacked = stacked_layout(mesh)
    return _load(source, lambda: Decoder(config, dtype, stacked=stacked), config.num_layers, mesh)


def load_drafter(source: TensorSource, config: DrafterConfig, dtype, mesh: Mesh, target: Decoder) -> AnyDrafter:
    """A drafter with its weights on the mesh; an embedding or head equal to the target's is shared with it."""
    stacked = stacked_layout(mesh)
    layers = config.backbone.num_layers
    drafter = _load(source, lambda: build_drafter(config, dtype, stacked=stacked), layers, mesh)
    if drafter.embed is not None and _same(drafter.embed.embedding[...], target.embed.embedding[...]):
        drafter.embed = None
    if drafter.head is not None:
        ours = drafter.head.kernel[...]
        theirs = target.head.kernel[...] if target.head is not None else target.embed.embedding[...].T
        if _same(ours, theirs):
            drafter.head = None
    return drafter


def random_decoder(config: DecoderConfig, dtype, mesh: Mesh, seed: int = 0) -> Decoder:
    """A target of random weights: for timing shapes whose weights are not at hand."""
    stacked = stacked_layout(mesh)
    return _random(lambda: Decoder(config, dtype, stacked=stacked), mesh, seed)


def random_drafter(config: DrafterConfig, dtype, mesh: Mesh, seed: int = 0) -> AnyDrafter:
    """An untrained drafter: about one accepted token a step, and the cost of a real one."""
    stacked = stacked_layout(mesh)
    return _random(lambda: build_drafter(config, dtype, stacked=stacked), mesh, seed)


def untrained_drafter_config(target: DecoderConfig, *, layers: int = 1, block_size: int = 7) -> DrafterConfig:
    """A small DSpark drafter for any target: five feature layers at a rounded linspace from 1 to n − 3."""
    last = max(target.num_layers - 3, 1)
    ids = sorted({round(x) for x in np.linspace(min(1, target.num_layers - 2), last, 5)})
    backbone = DecoderConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position=target.max_position,
        rope=RopeConfig(theta=target.rope.theta),
        qk_norm=True,
        model_type="qwen3",
    )
    return DrafterConfig(
        backbone=backbone,
        block_size=block_size,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=tuple(i for i in ids if i < target.num_layers - 1),
        predicts_from_anchor=True,
        markov="vanilla",
        markov_rank=32,
        confidence="hidden+markov",
    )


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that a drafter of this configuration has, under its path in a checkpoint."""
    module = nnx.eval_shape(lambda: build_drafter(config, jnp.float32, stacked=False))
    return {name: variable.shape for name, variable in _paths(module).items()}


def parameters(module: nnx.Module) -> Iterator[tuple[str, jax.Array]]:
    """(path, array) of every parameter, one a layer in either layout: what loading it reads, the other way."""
    for name, variable in _paths(module).items():
        value = variable.get_value()
        if variable.axes and variable.axes[0] == "layers":
            for i in range(value.shape[0]):
                yield name.replace("layers.", f"layers.{i}.", 1), value[i]
        else:
            yield name, value


def _same(ours: jax.Array, theirs: jax.Array) -> bool:
    return ours.shape == theirs.shape and bool(jnp.array_equal(ours, theirs))


def _paths(module: nnx.Module) -> dict[str, nnx.Variable]:
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)).replace("layers.blocks", "layers"): value for path, value in flat}


def _placed[ModuleT: nnx.Module](module: ModuleT, arrays: Iterable[tuple[str, jax.Array]]) -> ModuleT:
    variables = _paths(module)
    for name, array in arrays:
        variables[name].set_value(array)
    return module


def _load[ModuleT: nnx.Module](
    source: TensorSource, build: Callable[[], ModuleT], layers: int, mesh: Mesh
) -> ModuleT:
    module = nnx.eval_shape(build)
    variables = _paths(module)
    # A stacked parameter `layers.x` of [L, …] is read as `layers.0.x`, `layers.1.x`, …
    stacked = {name for name, v in variables.items() if v.axes and v.axes[0] == "layers"}
    expected: dict[str, tuple[int, ...]] = {}
    for name, variable in variables.items():
        if name in stacked:
            for i in range(layers):
                expected[name.replace("layers.", f"layers.{i}.", 1)] = variable.shape[1:]
        else:
            expected[name] = variable.shape
    buffers: dict[str, np.ndarray] = {}
    missing = dict.fromkeys(stacked, layers)

    def arrays() -> Iterator[tuple[str, jax.Array]]:
        for name, value in source.parameters(expected):
            match = re.match(r"layers\.(\d+)\.(.*)", name)
            whole = f"layers.{match[2]}" if match else name
            if match and whole in stacked:
                variable = variables[whole]
                if whole not in buffers:
                    buffers[whole] = np.empty(variable.shape, variable.dtype)
                buffers[whole][int(match[1])] = value
                missing[whole] -= 1
                if missing[whole]:
                    continue
                name, value = whole, buffers.pop(whole)
            variable = variables[name]
            placement = axes.sharding(mesh, variable.axes, variable.shape)
            # Writable, so no view of the mapped file, which an array on the CPU would keep open.
            owned = np.require(value, variable.dtype, ["C_CONTIGUOUS", "WRITEABLE"])
            yield name, jax.device_put(owned, placement)

    return _placed(module, arrays())


def _random[ModuleT: nnx.Module](build: Callable[[], ModuleT], mesh: Mesh, seed: int) -> ModuleT:
    module = nnx.eval_shape(build)
    key = jax.random.key(seed)

    def arrays() -> Iterator[tuple[str, jax.Array]]:
        for i, (name, variable) in enumerate(_paths(module).items()):
            placement = axes.sharding(mesh, variable.axes, variable.shape)
            if name.endswith("scale"):
                yield name, jnp.ones(variable.shape, variable.dtype, device=placement)
            elif name.endswith("bias"):
                yield name, jnp.zeros(variable.shape, variable.dtype, device=placement)
            else:
                make = jax.jit(_normal, static_argnums=(1, 2), out_shardings=placement)
                yield name, make(jax.random.fold_in(key, i), variable.shape, variable.dtype)

    return _placed(module, arrays())


def _normal(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)
