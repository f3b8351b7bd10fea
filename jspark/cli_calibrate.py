"""`jspark calibrate`: temperatures that make a drafter's confidence honest.

Knows: flags and what is said at the end. Does not know: how temperatures are fitted (evaluate/).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from jspark.config import DType
from jspark.errors import UserError

if TYPE_CHECKING:
    from jspark.evaluate.data import DataSet


@dataclass(frozen=True)
class Calibrate:
    """Fit a DSpark drafter's confidence to what really survives, and check the fit on other prompts."""

    model_path: str
    """The target: a Hugging Face folder, a GGUF file, or the built-in smollm2-135m."""
    speculative_draft_model_path: str
    """The drafter's folder."""
    output: str
    """The calibration, ending in .json, for --speculative-dspark-confidence-sts-path; a PNG comes beside it."""
    data: Annotated[tuple[str, ...], arg(metavar="[NAME=]FILE")] = ()
    """Prompts as JSONL: {"turns": ["…"]} or {"prompt": "…"}. Without any the target asks itself questions."""
    num_prompts: Annotated[int, arg(help_behavior_hint="(default: 1024, on the CPU 32)")] = 0
    """Questions that the target asks itself, or the first lines of each file (there, all of them by default)."""
    max_new_tokens: int = 256
    """Tokens an answer has at most."""
    temperature: float = 1.0
    """Of sampled requests; greedy ones are fitted beside them."""
    speculative_sampling: Literal["rejection", "coupled"] = "rejection"
    """The sampler of sampled requests; drafts survive less often under coupled."""
    speculative_dspark_block_size: Annotated[int, arg(help_behavior_hint="(default: the drafter's)")] = 0
    """Drafted tokens a step, γ; the calibration holds for this γ only."""
    seed: int = 0
    """Of the questions and of sampled answers."""
    concurrency: Annotated[int, arg(help_behavior_hint="(default: chosen for the device)")] = 0
    """Prompts that are answered at the same time."""
    context_length: Annotated[int, arg(help_behavior_hint="(default: what the prompts need)")] = 0
    """Longest prompt and answer together, in tokens."""
    chunked_prefill_size: int = 512
    """Prompt tokens that a step takes in beside the answers in progress."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""

    def run(self) -> int:
        """Collects, fits, checks, saves and shows."""
        from jspark.bench.report import check_output, command_line, describe
        from jspark.calibration import CLASSES, Temperatures
        from jspark.cli_eval import progress
        from jspark.evaluate import calibrate, report
        from jspark.evaluate.collect import Recorder
        from jspark.evaluate.data import read_data
        from jspark.evaluate.figures import draw_reliability
        from jspark.evaluate.run import Drafter, Settings, context_for, load_checked, make_ready, open_llm
        from jspark.loading import find_drafter
        from jspark.request import SamplingParams

        if self.temperature <= 0:
            raise UserError(f"--temperature is {self.temperature:g}; sampled requests have one above 0")
        if self.num_prompts < 0:
            raise UserError(f"--num-prompts is {self.num_prompts}; it must be 0 (choose for me) or positive")
        output = Path(self.output)
        check_output(output)
        draft = self.speculative_draft_model_path
        settings = Settings(
            model_path=self.model_path,
            drafters=(Drafter("drafter", draft),),
            temperatures=(0.0, self.temperature),
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            speculative_sampling=self.speculative_sampling,
            block_size=self.speculative_dspark_block_size,
            concurrency=self.concurrency,
            context_length=self.context_length,
            chunked_prefill_size=self.chunked_prefill_size,
            dtype=self.dtype,
        )
        params = [
            SamplingParams(
                temperature=t, max_tokens=self.max_new_tokens, speculative_sampling=self.speculative_sampling
            )
            for t in settings.temperatures
        ]
        data = [read_data(spec, self.num_prompts) for spec in self.data]
        found = find_drafter(draft, None)
        if found and found.checkpoint and found.checkpoint.config.confidence == "none":
            raise UserError(f"{draft} has no confidence head to calibrate; pass a DSpark drafter that has one")
        target = load_checked(settings)
        recorder = Recorder()
        with progress() as tell:
            data = data or [self._self_written(target, tell)]
            llm = open_llm(target, draft, context_for(settings, data, target), settings, recorder)
            total = sum(len(c.turns) or 1 for d in data for c in d.conversations)
            tell("compiling", 0, total)
            make_ready([llm], params)
            blocks = {}
            for name, own in zip(CLASSES, params, strict=True):
                blocks[name] = calibrate.collect(
                    llm, recorder, data, own, self.seed, lambda d, n, c=name: tell(f"{d}, {c}", n, total)
                )
        record = calibrate.calibrate(blocks)
        head = describe("calibrate", command_line("jspark calibrate", self), target.mesh)
        record |= {
            "dataset": ", ".join(d.name for d in data),
            "prompts": {d.name: len(d.conversations) for d in data},
            "block_size": llm.engine.block_size,
            **head,
        }
        fitted = {name: record["classes"][name]["temperatures"] for name in CLASSES}
        Temperatures.of(record["temperatures"]).table(llm.engine.block_size)
        draw_reliability(
            {n: calibrate.reliability(blocks[n][1], t) for n, t in fitted.items()}, output.with_suffix(".png")
        )
        report.write_json(output, record)
        rows = []
        notes = [f"saved as {output}, with a picture beside it; figures are of prompts that the fit has not seen"]
        for name, own in record["classes"].items():
            for when in ("before", "after"):
                pooled = own[when]["pooled"]
                figures = (report.number(pooled[k], 4) for k in ("ece", "ece_noise", "auc", "brier"))
                rows.append([f"{name}, {when}", f"{own['check_blocks']:,}", *figures])
            if own["check_blocks"] < calibrate.ENOUGH_BLOCKS:
                notes.append(
                    f"{name}: below {calibrate.ENOUGH_BLOCKS:,} blocks an ECE reads high by chance "
                    "(the column shows by how much)"
                )
            notes.append(f"{name}: temperatures {', '.join(f'{t:.3f}' for t in own['temperatures'])}")
        header = ["prefix survival", "blocks", "ECE", "ECE of chance", "AUC", "Brier"]
        report.show(iter([("confidence of all positions together", header, rows)]), notes)
        return 0

    def _self_written(self, target, tell) -> DataSet:
        """Questions of the target's own, by plain decoding."""
        from jspark.evaluate.data import self_written, user_opening
        from jspark.llm import LLM

        cpu = target.mesh.devices.flat[0].platform == "cpu"
        count = self.num_prompts or (32 if cpu else 1024)
        opening = len(user_opening(target))
        longest = 128
        tell("writing questions", 0, count)
        writer = LLM(
            target,
            max_running_requests=self.concurrency,
            context_length=min(opening + longest, target.config.max_position),
            single_shapes=not cpu,
        )
        return self_written(writer, count, self.seed, longest)
