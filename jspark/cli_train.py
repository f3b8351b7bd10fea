"""`jspark train`: a drafter for a target, from text that the target wrote.

Knows: flags, recipes and what is printed. Does not know: how training works (train/).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from jspark.config import DType
from jspark.errors import UserError


@dataclass(frozen=True)
class Train:
    """Train a DSpark, DFlash or EAGLE-3 drafter on text that its target wrote (see `jspark data`)."""

    model_path: str
    """The target: a Hugging Face folder, a GGUF file, or the built-in smollm2-135m."""
    data: Annotated[tuple[str, ...], arg(metavar="FOLDER")] = ()
    """Folders of text; without one the target first writes --text-tokens into OUTPUT/text."""
    output: Annotated[str, arg(metavar="FOLDER")] = "drafter-run"
    """The folder of the run: checkpoints, metrics, and in the end `drafter`."""
    resume: bool = False
    """Goes on with the run in that folder, bit for bit as if it had not stopped."""
    algorithm: Literal["DSPARK", "DFLASH", "EAGLE3"] = "DSPARK"
    """What kind of drafter."""
    layers: int = 5
    """Layers of the drafter; EAGLE-3 always has one."""
    block_size: int = 7
    """Drafted tokens a step, γ."""
    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """Sequential head of DSpark."""
    markov_rank: Annotated[int, arg(help_behavior_hint="(default: 256, 32 below 200M parameters)")] = 0
    """Rank of that head."""
    no_confidence: bool = False
    """Leaves the confidence head out."""
    dflash_tv: bool = False
    """DFlash with DSpark's total variation term beside the cross-entropy of its reference."""
    target_layers: Annotated[str | None, arg(metavar="ID,ID,…", help_behavior_hint="(default: five, spread)")] = (
        None
    )
    """Target layers whose outputs the drafter reads; −1 is the embedding."""
    mask_token_id: Annotated[int, arg(help_behavior_hint="(default: the last token)")] = -1
    """A token that no text holds."""
    text_tokens: int = 1_000_000
    """Tokens of text to write where no --data is given."""
    batch_size: int = 32
    """Sequences a step."""
    sequence_length: int = 1024
    """Tokens of a sequence, filled with whole conversations."""
    anchors: int = 256
    """Blocks that are drafted in every sequence."""
    accumulate: int = 1
    """Parts a step is computed in, for less memory."""
    epochs: float = 1.0
    """Passes over the text."""
    steps: Annotated[int, arg(help_behavior_hint="(default: as --epochs says)")] = 0
    """Steps of the whole run."""
    learning_rate: float = 6e-4
    """Highest rate, after the warm-up."""
    chunk: int = 1024
    """Blocks whose logits are in memory at a time."""
    remat: bool = False
    """Computes layers again in the backward pass, for less memory."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of the computation; master weights are always float32."""
    devices: Annotated[int, arg(help_behavior_hint="(default: all)")] = 0
    """Devices that share a step."""
    save_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between lines of metrics."""
    seconds: float = 0.0
    """Stop after this time with a checkpoint, to go on with --resume; 0 is no limit."""
    seed: int = 0
    """Of initial weights, order and anchors."""

    def run(self) -> int:
        """Trains and exports."""
        import jax

        from jspark.train import check_installed

        check_installed()
        from jspark import programs
        from jspark.bench.ceilings import matmul_rate
        from jspark.bench.report import show
        from jspark.loading import load_target
        from jspark.train.config import DrafterShape, TrainConfig, loss_weights
        from jspark.train.loop import Run, train
        from jspark.train.text import Text

        programs.use_compilation_cache()
        count = self.devices or len(jax.devices())
        if count > len(jax.devices()):
            raise UserError(f"{count} devices were asked for and JAX sees {len(jax.devices())}; lower --devices")
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((count, 1), ("data", "tensor"), auto, devices=jax.devices()[:count])
        target = load_target(self.model_path, self.dtype, mesh, scanned=True)
        if self.head != "vanilla" and self.algorithm != "DSPARK":
            raise UserError(f"--head belongs to DSPARK and {self.algorithm} was chosen; drop one of the two")
        if self.dflash_tv and self.algorithm != "DFLASH":
            raise UserError(f"--dflash-tv belongs to DFLASH and {self.algorithm} was chosen; drop one of the two")
        small = target.config.num_layers * target.config.hidden_size**2 * 12 < 2e8
        config = TrainConfig(
            drafter=DrafterShape(
                algorithm=self.algorithm,
                layers=self.layers,
                block_size=self.block_size,
                markov=self.head,
                markov_rank=self.markov_rank or (32 if small else 256),
                confidence=not self.no_confidence,
                target_layer_ids=_ids(self.target_layers),
                mask_token_id=self.mask_token_id,
            ),
            loss=loss_weights(self.algorithm, dflash_tv=self.dflash_tv),
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            anchors=self.anchors,
            accumulate=self.accumulate,
            epochs=self.epochs,
            steps=self.steps,
            learning_rate=self.learning_rate,
            dtype=target.dtype,
            seed=self.seed,
            chunk=self.chunk,
            remat=self.remat,
        )
        gpu = mesh.devices.flat[0].platform != "cpu"
        run = Run(
            folder=Path(self.output),
            resume=self.resume,
            log_every=self.log_every,
            save_every=self.save_every,
            seconds=self.seconds,
            peak=count * matmul_rate(mesh, target.dtype) if gpu else None,
        )
        folders = [Path(p) for p in self.data] or [self._write_text()]
        summary = train(target, Text(folders), config, run, mesh)
        show(f"{self.output}: {self.algorithm} drafter for {target.name}", ("", ""), _table(summary), ())
        return 0

    def _write_text(self) -> Path:
        from jspark.cli_data import Data

        folder = Path(self.output) / "text"
        if not (folder / "report.json").exists():
            Data(self.model_path, str(folder), tokens=self.text_tokens, dtype=self.dtype, seed=self.seed).run()
        return folder


def _table(summary: dict) -> list[tuple[str, str]]:
    last = summary["last"]
    rows = [("steps", f"{summary['steps_done']} of {summary['steps']}")]
    if last:
        rows += [
            ("loss", f"{last['loss']:.4f}"),
            ("accept length, teacher-forced", f"{last['accept_length']:.3f}"),
            ("accepted by position", " ".join(f"{a:.2f}" for a in last["accept"])),
        ]
    rows.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s"))
    if summary.get("model_flop_utilisation"):
        rows.append(("model FLOP utilisation", f"{summary['model_flop_utilisation']:.1%}"))
    return rows


def _ids(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"--target-layers {text!r} is no list of layers; write 1,7,14") from None
