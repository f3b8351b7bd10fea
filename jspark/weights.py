"""Weights on the devices: checkpoint tensors (or random numbers) into modules, placed once, in one dtype.

Knows: how a module's parameters map to checkpoint names in every layout, and where they are placed.
Does not know: file formats (checkpoint/), or what the modules compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jspark import axes
from jspark.config import DecoderConfig, DrafterConfig, RopeConfig
from jspark.models.any_drafter import AnyDrafter, build_drafter
from jspark.models.decoder import Decoder, Layout


class TensorSource(Protocol):
    """Anything that yields named parameters: a checkpoint, or a test's dictionary."""

    def parameters(self, expected: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, array) for every expected name, after checking names and shapes."""
        ...


def layout(mesh: Mesh, scanned: bool = False) -> Layout:
    """GPUs want projections joined: fewer products. A mesh cannot share joined ones out over its devices.

    Stacked layers are for a scan over them alone (scanned), as training does: XLA copies what is sliced out of a
    stack, all weights of a model in every run.
    """
    gpu = mesh.devices.flat[0].platform != "cpu"
    return Layout(stacked=gpu and scanned, joined=gpu and mesh.size == 1)


def load_decoder(source: TensorSource, config: DecoderConfig, dtype, mesh: Mesh, *, scanned=False) -> Decoder:
    """A target with its weights on the mesh. scanned: see `layout`."""
    return _load(source, lambda: Decoder(config, dtype, layout(mesh, scanned)), mesh)


def load_drafter(source: TensorSource, config: DrafterConfig, dtype, mesh: Mesh, target: Decoder) -> AnyDrafter:
    """A drafter with its weights on the mesh; an embedding or head equal to the target's is shared with it."""
    drafter = _load(source, lambda: build_drafter(config, dtype, layout(mesh)), mesh)
    if drafter.embed is not None and _same(drafter.embed.embedding[...], target.embed.embedding[...]):
        drafter.embed = None
    if drafter.head is not None:
        ours = drafter.head.kernel[...]
        theirs = target.head.kernel[...] if target.head is not None else target.embed.embedding[...].T
        if _same(ours, theirs):
            drafter.head = None
    return drafter


def random_decoder(config: DecoderConfig, dtype, mesh: Mesh, seed: int = 0, *, scanned=False) -> Decoder:
    """A target of random weights: for timing shapes whose weights are not at hand. scanned: see `layout`."""
    return _random(lambda: Decoder(config, dtype, layout(mesh, scanned)), mesh, seed)


def random_drafter(config: DrafterConfig, dtype, mesh: Mesh, seed: int = 0) -> AnyDrafter:
    """An untrained drafter: about one accepted token a step, and the cost of a real one."""
    return _random(lambda: build_drafter(config, dtype, layout(mesh)), mesh, seed)


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
    module = nnx.eval_shape(lambda: build_drafter(config, jnp.float32, Layout()))
    return {name: variable.shape for name, variable in _paths(module).items()}


def parameters(module: nnx.Module) -> Iterator[tuple[str, jax.Array]]:
    """(path, array) of every parameter, whatever the layout: what loading it reads, the other way."""
    for name, variable in _paths(module).items():
        value = variable.get_value()
        for piece, index in _pieces(name, variable):
            yield piece, value if index == _WHOLE else value[index]


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


#: Where a parameter of the checkpoint lies in one of a module.
type _Index = tuple[int | slice | EllipsisType, ...]
_WHOLE: _Index = (...,)


def _pieces(name: str, variable: nnx.Variable) -> Iterator[tuple[str, _Index]]:
    """The checkpoint's names of a parameter's pieces, and where each lies: layers stacked, parts side by side."""
    parts: list[tuple[str, _Index]] = [(name, _WHOLE)]
    if variable.parts:
        *stem, _, leaf = name.split(".")
        ends = np.cumsum([width for _, width in variable.parts]).tolist()
        spans = zip(variable.parts, [0, *ends[:-1]], ends, strict=True)
        parts = [(".".join([*stem, part, leaf]), (..., slice(a, b))) for (part, _), a, b in spans]
    stacked = bool(variable.axes) and variable.axes[0] == "layers"
    for part, index in parts:
        for i in range(variable.shape[0]) if stacked else (None,):
            if i is None:
                yield part, index
            else:
                yield part.replace("layers.", f"layers.{i}.", 1), (i, *index)


def _load[ModuleT: nnx.Module](source: TensorSource, build: Callable[[], ModuleT], mesh: Mesh) -> ModuleT:
    module = nnx.eval_shape(build)
    variables = _paths(module)
    places = {piece: (name, index) for name, v in variables.items() for piece, index in _pieces(name, v)}
    missing = Counter(name for name, _ in places.values())
    # An array of one number stands for each parameter: only shapes are asked of it.
    shapes = {name: np.broadcast_to(0, v.shape) for name, v in variables.items()}
    expected = {piece: shapes[name][index].shape for piece, (name, index) in places.items()}
    buffers: dict[str, np.ndarray] = {}

    def arrays() -> Iterator[tuple[str, jax.Array]]:
        for piece, value in source.parameters(expected):
            name, index = places[piece]
            variable = variables[name]
            if index != _WHOLE:
                if name not in buffers:
                    buffers[name] = np.empty(variable.shape, variable.dtype)
                buffers[name][index] = value
                missing[name] -= 1
                if missing[name]:
                    continue
                value = buffers.pop(name)
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
