"""`jspark bench`: the benchmarks as commands.

Knows: flags and their defaults. Does not know: how anything is measured (bench/).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg, subcommand

from jspark.cli_bench_engine import EngineLoad, Soak, whole_numbers
from jspark.config import AttentionBackend, DType
from jspark.errors import UserError

if TYPE_CHECKING:
    from jspark.bench.load import Settings


@dataclass(frozen=True)
class Cpu:
    """Plain decode on the CPU in float32, beside transformers and the memory's floor."""

    model_path: str = "smollm2-135m"
    """A Hugging Face folder, a GGUF file, or the built-in model."""
    reference_python: Annotated[str | None, arg(metavar="PATH", help_behavior_hint="(default: none)")] = None
    """An interpreter with transformers and torch, to compare with (benchmarks/README.md)."""
    new_tokens: int = 64
    """Tokens to generate."""
    context: int = 64
    """Tokens of the prompt."""
    repeats: int = 5
    """Timed runs of each side, in turns."""
    output: str = "benchmarks/cpu/plain_decode.json"
    """The record; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        import jax

        from jspark.axes import single_device_mesh
        from jspark.bench import cpu, report

        # A GPU that may be there has no part in this.
        jax.config.update("jax_platforms", "cpu")
        output = Path(self.output)
        report.check_output(output)
        record = report.describe("cpu", report.command_line("jspark bench cpu", self), single_device_mesh())
        results = cpu.measure(self.model_path, self.reference_python, self.new_tokens, self.context, self.repeats)
        record["results"] = results
        report.save(record, output, lambda axes: cpu.draw(results, axes))
        cpu.show(results)
        return 0


@dataclass(frozen=True)
class Step:
    """Time of the engine's own programs and of a whole step, beside the device's floor."""

    model_path: str = "smollm2-135m"
    """The target: a Hugging Face folder, a GGUF file, or the built-in model."""
    shape: Annotated[
        Literal["qwen3-8b", "smollm2-135m"] | None,
        arg(metavar="{qwen3-8b,smollm2-135m}", help_behavior_hint="(default: none)"),
    ] = None
    """A target of this shape with random weights, instead of a model."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    rows: Annotated[
        str | None, arg(metavar="R,R,…", help_behavior_hint="(default: 1,8 on the CPU, 1,64 elsewhere)")
    ] = None
    """Requests in a step."""
    context: Annotated[int, arg(help_behavior_hint="(default: 128 on the CPU, 1024 elsewhere)")] = 0
    """Tokens each request has, its window included."""
    block_size: int = 7
    """Drafted tokens a step, γ."""
    steps: Annotated[int, arg(help_behavior_hint="(default: 6 on the CPU, 30 elsewhere)")] = 0
    """Steps in each timed batch."""
    attention_backend: AttentionBackend = "auto"
    """What computes attention."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        from jspark.axes import single_device_mesh
        from jspark.bench import report, step

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        mesh = single_device_mesh()
        cpu = mesh.devices.flat[0].platform == "cpu"
        settings = step.Settings(
            model_path=self.model_path,
            shape=self.shape,
            dtype=self.dtype or ("float32" if cpu else "bfloat16"),
            rows=whole_numbers("rows", self.rows) if self.rows else ((1, 8) if cpu else (1, 64)),
            context=self.context or (128 if cpu else 1024),
            block_size=self.block_size,
            steps=self.steps or (6 if cpu else 30),
            attention_backend=self.attention_backend,
        )
        record = report.describe("step", report.command_line("jspark bench step", self), mesh)
        results = step.measure(settings, mesh)
        record["results"] = results
        if output is not None:
            report.save(record, output, lambda axes: step.draw(results, axes))
        step.show(results)
        return 0


@dataclass(frozen=True)
class Host:
    """What the engine's loop costs the host in a step, by stage, with a device that computes nothing."""

    rows: Annotated[str, arg(metavar="R,R,…")] = "1,8,64,256"
    """Requests in a step."""
    layers: int = 1
    """Of the target, whose pages and weights are arrays of every call."""
    steps: int = 500
    """Steps that count."""
    scheduler_rows: int = 1024
    """Requests of the scheduler alone."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        from jspark.axes import single_device_mesh
        from jspark.bench import host, report

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        rows = whole_numbers("rows", self.rows)
        if min(*rows, self.layers, self.steps, self.scheduler_rows) < 1:
            raise UserError("--rows, --layers, --steps and --scheduler-rows must be at least 1; raise it")
        mesh = single_device_mesh()
        record = report.describe("host", report.command_line("jspark bench host", self), mesh)
        record["results"] = results = host.measure(
            host.Settings(rows, self.layers, self.steps, self.scheduler_rows), mesh
        )
        if output is not None:
            report.save(record, output, lambda axes: host.draw(results, axes))
        host.show(results)
        return 0


@dataclass(frozen=True)
class Kernels:
    """Every version of the attention kernels beside its floor, XLA and cuDNN; on a CPU tiny cases in XLA."""

    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of queries and KV cache."""
    soak: Annotated[float, arg(metavar="SECONDS", help_behavior_hint="(default: 0, none)")] = 0.0
    """Check random shapes for so long instead; the record holds their errors."""
    seed: int = 0
    """Of the random shapes."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        from jspark.axes import single_device_mesh
        from jspark.bench import kernels, report

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        mesh = single_device_mesh()
        cpu = mesh.devices.flat[0].platform == "cpu"
        record = report.describe("kernels", report.command_line("jspark bench kernels", self), mesh)
        dtype = self.dtype or ("float32" if cpu else "bfloat16")
        if self.soak:
            results = kernels.soak(mesh, dtype, self.soak, self.seed)
            show, draw = kernels.show_soak, kernels.draw_soak
        else:
            results = kernels.measure(mesh, dtype)
            show, draw = kernels.show, kernels.draw
        record["results"] = results
        if output is not None:
            report.save(record, output, lambda axes: draw(results, axes))
        show(results)
        if cpu:
            print("The kernels need an NVIDIA GPU: on a CPU this runs the XLA reference, on small cases.")
        return 0


@dataclass(frozen=True)
class Training:
    """Time of a training step and its parts on random weights, beside the device's matrix rate."""

    shape: Annotated[tuple[str, ...], arg(metavar="{smollm2-135m,qwen3-4b,tiny}")] = ()
    """Targets to train for; all but tiny where none is named."""
    algorithm: Literal["DSPARK", "DFLASH", "EAGLE3"] = "DSPARK"
    """What is trained."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of the computation."""
    batch_size: Annotated[int, arg(help_behavior_hint="(default: 32, 8 beyond a billion parameters)")] = 0
    """Sequences a step."""
    sequence_length: Annotated[int, arg(help_behavior_hint="(default: 1024, 2048 beyond a billion)")] = 0
    """Tokens of a sequence."""
    anchors: Annotated[int, arg(help_behavior_hint="(default: 256)")] = 256
    """Blocks a sequence."""
    chunk: int = 1024
    """Blocks whose logits are in memory at a time."""
    repeats: int = 10
    """Timed steps."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        from jspark.axes import single_device_mesh
        from jspark.bench import report, train
        from jspark.train.config import DrafterShape, TrainConfig

        unknown = [s for s in self.shape if s not in train.SHAPES]
        if unknown:
            raise UserError(f"--shape {unknown[0]!r} is unknown; there are {', '.join(train.SHAPES)}")
        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        mesh = single_device_mesh()
        cpu = mesh.devices.flat[0].platform == "cpu"
        record = report.describe("train", report.command_line("jspark bench train", self), mesh)
        results = []
        for name in self.shape or ("smollm2-135m", "qwen3-4b"):
            large = name == "qwen3-4b"
            config = TrainConfig(
                drafter=DrafterShape(algorithm=self.algorithm, markov_rank=256 if large else 32),
                batch_size=self.batch_size or (8 if large else 32),
                sequence_length=self.sequence_length or (2048 if large else 1024),
                anchors=self.anchors,
                chunk=self.chunk,
            )
            dtype = self.dtype or ("float32" if cpu else "bfloat16")
            results.append(train.measure(train.Settings(name, config, dtype, self.repeats), mesh))
        record["results"] = results
        if output is not None:
            report.save(record, output, lambda axes: train.draw(results, axes))
        train.show(results)
        return 0


@dataclass(frozen=True)
class Serve:
    """A server under load: streams, clients that go away, what leaks and what waits; and how fast it starts."""

    url: Annotated[str | None, arg(metavar="URL", help_behavior_hint="(default: start one)")] = None
    """A server of jspark that runs already, such as http://127.0.0.1:30000."""
    server: Annotated[str, arg(metavar="FLAGS")] = "--model-path smollm2-135m"
    """What the server is started with: flags of `jspark serve` in one word."""
    starts: bool = False
    """First times two starts until the first token: with nothing compiled, and with what the first one left."""
    engine_alone: bool = False
    """First puts the same load on an engine without HTTP; answers are then compared with LLM.generate's."""
    concurrency: Annotated[str, arg(metavar="N,N,…|none")] = "1,8,32"
    """Clients at a time; a run for each."""
    requests: int = 150
    """Requests of a run."""
    requests_per_client: Annotated[int | None, arg(help_behavior_hint="(default: no bound)")] = None
    """Fewer of them where there are few clients: at most so many each."""
    cancelled: float = 0.1
    """Share of requests whose client goes away after one to three chunks."""
    seeded: float = 0.0
    """Share of prompts that are sampled, at temperature 1 with a seed; the others are greedy."""
    prompts: int = 8
    """Different prompts."""
    prompt_tokens: Annotated[str, arg(metavar="N|N-N")] = "32"
    """Tokens of a prompt, or the fewest and the most; they are random."""
    new_tokens: int = 32
    """Tokens of an answer."""
    seed: int = 0
    """Of prompts and cancellations."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The record, ending in .json; a picture is put beside it."""

    def run(self) -> int:
        """Measures, shows and saves."""
        # The server has the device's memory; this process only looks at the device's name.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

        from jspark.axes import single_device_mesh
        from jspark.bench import engine_alone, report, serve
        from jspark.bench.server_process import started, starts

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        settings = self._settings()
        record = report.describe("serve", report.command_line("jspark bench serve", self), single_device_mesh())
        record["results"] = results = {
            "starts": starts(self.server) if self.starts else None,
            "engine_alone": None,
            "runs": [],
        }
        if settings.concurrency:
            alone = engine_alone.apart(self.server, settings) if self.engine_alone else None
            expected = alone["expected"] if alone else None
            results["engine_alone"] = alone["runs"] if alone else None
            if self.url is not None:
                results |= serve.measure(self.url, settings, None, expected)
            else:
                with started(self.server) as server:
                    results |= serve.measure(server.address, settings, server.process, expected)
        record["results"] = results
        if output is not None:
            report.save(record, output, lambda axes: serve.draw(results, axes))
        serve.show(results)
        return 0

    def _settings(self) -> Settings:
        from jspark.bench.load import Settings

        for name in ("requests", "prompts", "new_tokens", "requests_per_client"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name in ("cancelled", "seeded"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name} is {getattr(self, name):g}; it must be between 0 and 1")
        clients = () if self.concurrency == "none" else whole_numbers("concurrency", self.concurrency)
        if min(clients, default=1) < 1:
            raise UserError(f"--concurrency {self.concurrency!r} must be numbers of at least 1; correct it")
        if not clients and not self.starts:
            raise UserError("--concurrency none leaves nothing to measure; add --starts, or name numbers")
        if self.url is not None and (self.starts or self.engine_alone):
            raise UserError("--starts and --engine-alone need a server of their own; drop them, or drop --url")
        ends = whole_numbers("prompt-tokens", self.prompt_tokens.replace("-", ","))
        if not 1 <= len(ends) <= 2 or ends[0] < 1:
            raise UserError(f"--prompt-tokens {self.prompt_tokens!r} is no length or range; write 32 or 1-500")
        return Settings(
            concurrency=clients,
            requests=self.requests,
            cancelled=self.cancelled,
            seeded=self.seeded,
            prompts=self.prompts,
            prompt_tokens=(ends[0], ends[-1]),
            new_tokens=self.new_tokens,
            seed=self.seed,
            per_asker=self.requests_per_client,
        )


@dataclass(frozen=True)
class Bench:
    """Measure speed; every figure comes with the floor that this machine sets."""

    what: (
        Annotated[Cpu, subcommand("cpu", prefix_name=False)]
        | Annotated[Step, subcommand("step", prefix_name=False)]
        | Annotated[Host, subcommand("host", prefix_name=False)]
        | Annotated[Kernels, subcommand("kernels", prefix_name=False)]
        | Annotated[Training, subcommand("train", prefix_name=False)]
        | Annotated[Serve, subcommand("serve", prefix_name=False)]
        | Annotated[EngineLoad, subcommand("engine", prefix_name=False)]
        | Annotated[Soak, subcommand("soak", prefix_name=False)]
    )

    def run(self) -> int:
        """Runs the chosen benchmark."""
        return self.what.run()
