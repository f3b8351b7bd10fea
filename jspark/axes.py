"""Axis names: the letters of array annotations, and logical parameter axes → mesh axes.

Annotation letters (architecture.md's vocabulary): r rows · g drafted tokens γ · w = γ+1 · t packed tokens ·
v vocabulary · h hidden · n query heads · k KV heads · d head dim · p pages · s page size · l layers.
Does not know which parameters exist; modules name their own logical axes.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

#: Logical axis → mesh axis. A mesh without that axis, or a size it does not divide, replicates the axis.
RULES: dict[str, str] = {
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


def sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The placement of an array whose dimensions have the logical names `axes`, on a mesh of any shape."""
    spec = []
    for name, size in zip(axes, shape, strict=True):
        axis = RULES.get(name or "")
        fits = axis is not None and axis in mesh.axis_names and size % mesh.shape[axis] == 0
        spec.append(axis if fits else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def single_device_mesh(device=None) -> Mesh:
    """A 1×1 mesh (data, tensor) over one device: the default."""
    devices = [device or jax.devices()[0]]
    return jax.make_mesh((1, 1), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2, devices=devices)
