"""Frozen configurations of a training run, and the drafter they describe.

Knows: defaults, ranges, which combinations are contradictory. Does not know: flags, data, or how training works.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from jspark.config import DecoderConfig, DrafterConfig, DType, Eagle3Config
from jspark.errors import UserError
from jspark.train.objective import Weights
from jspark.weights import untrained_drafter_config

TrainedAlgorithm = Literal["DSPARK", "DFLASH", "EAGLE3"]


@dataclass(frozen=True)
class DrafterShape:
    """The drafter to train. Zero and () mean: chosen from the target.

    layers: of a block drafter; EAGLE-3 has one. target_layer_ids: the target layers it reads, −1 the embedding.
    mask_token_id: a token that no text holds.
    """

    algorithm: TrainedAlgorithm = "DSPARK"
    layers: int = 5
    block_size: int = 7
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 256
    confidence: bool = True
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = -1

    def config(self, target: DecoderConfig) -> DrafterConfig:
        """The configuration of the drafter for this target; UserError for what does not fit it."""
        for name in ("layers", "block_size", "markov_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        layers = 1 if self.algorithm == "EAGLE3" else self.layers
        base = untrained_drafter_config(target, layers=layers, block_size=self.block_size)
        ids = self.target_layer_ids or base.target_layer_ids
        bad = [i for i in ids if not -1 <= i < target.num_layers - 1]
        if bad or len(set(ids)) != len(ids):
            raise UserError(
                f"target layer {bad[0] if bad else ids} is outside -1..{target.num_layers - 2} or named twice; "
                f"the target has {target.num_layers} layers, and a drafter predicts what the last one gives"
            )
        mask = target.vocab_size - 1 if self.mask_token_id == -1 else self.mask_token_id
        if not 0 <= mask < target.vocab_size:
            raise UserError(
                f"the mask token id {mask} is outside the vocabulary of {target.vocab_size}; correct it"
            )
        headless = self.algorithm != "DSPARK"
        with_confidence = "hidden+markov" if self.confidence else "none"
        return replace(
            base,
            target_layer_ids=tuple(ids),
            mask_token_id=mask,
            markov="none" if headless else self.markov,
            markov_rank=0 if headless else self.markov_rank,
            confidence="none" if headless else with_confidence,
            eagle3=Eagle3Config() if self.algorithm == "EAGLE3" else None,
        )


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    batch_size: sequences a step, over all devices and all accumulated parts. anchors: blocks a sequence.
    accumulate: parts that a step is computed in. steps: 0 is one pass over the text, or what `epochs` says.
    chunk: blocks whose logits exist at a time. remat: layers are computed again in the backward pass.
    """

    drafter: DrafterShape = field(default_factory=DrafterShape)
    loss: Weights = field(default_factory=Weights)
    batch_size: int = 32
    sequence_length: int = 1024
    anchors: int = 256
    accumulate: int = 1
    epochs: float = 1.0
    steps: int = 0
    learning_rate: float = 6e-4
    warmup: float = 0.04
    final_learning_rate: float = 0.0
    weight_decay: float = 0.01
    clip: float = 1.0
    dtype: DType = "bfloat16"
    seed: int = 0
    chunk: int = 1024
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "anchors", "accumulate", "chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.steps < 0 or self.epochs <= 0:
            raise UserError("a run needs at least one step; give a positive number of steps or epochs")
        if self.batch_size % self.accumulate:
            raise UserError(
                f"a batch of {self.batch_size} cannot be cut into {self.accumulate} equal parts; change one"
            )
        if self.anchors >= self.sequence_length:
            raise UserError(
                f"{self.anchors} anchors do not fit a sequence of {self.sequence_length}; lower the number"
            )
        if not (0 < self.learning_rate < 1 and 0 <= self.warmup < 1 and self.clip > 0):
            raise UserError("learning rate, warm-up share and clip must be positive, the first two below 1")

    def as_record(self) -> dict[str, Any]:
        """What a checkpoint keeps: a run goes on only under the same."""
        return asdict(self)


def loss_weights(algorithm: TrainedAlgorithm, *, dflash_tv: bool = False) -> Weights:
    """The losses of each algorithm's reference; dflash_tv: DFlash with DSpark's mixture instead."""
    if algorithm == "DSPARK":
        return Weights()
    if algorithm == "DFLASH":
        return Weights(0.1, 0.9, 0.0) if dflash_tv else Weights(1.0, 0.0, 0.0)
    # Steps of the training-time test weigh 0.8^k.
    return Weights(0.0, 0.0, 0.0, decay=-1 / math.log(0.8), soft=1.0)
