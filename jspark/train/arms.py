"""What is trained: the drafter with its loss, its cost and its export.

Knows: which pieces belong together. Does not know: the loop, or how any piece works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jspark.checkpoint.export import export_drafter
from jspark.loading import Target
from jspark.train import flops
from jspark.train.attention import implementation
from jspark.train.config import TrainConfig
from jspark.train.step import LossFunction, Trainee, drafter_loss
from jspark.weights import random_drafter


@dataclass(frozen=True)
class Arm:
    """One kind of drafter in training. flops: of a step. export(module, folder) writes the drafter down."""

    trainee: Trainee
    loss: LossFunction
    flops: float
    export: Callable[[Any, Path], None]


def make(config: TrainConfig, target: Target, mesh: Mesh) -> Arm:
    """The arm that `config` asks for; UserError for a drafter that cannot be made for this target."""
    drafter = config.drafter.config(target.config)
    how = implementation(mesh.devices.flat[0], config.dtype)
    module = random_drafter(drafter, jnp.float32, mesh, config.seed)

    def export(module: Any, folder: Path) -> None:
        export_drafter((module, drafter), folder, dtype="bfloat16", overwrite=True)

    return Arm(
        trainee=Trainee(module),
        loss=drafter_loss(config, drafter, target.config, how),
        flops=flops.step(config, drafter, target.config),
        export=export,
    )
