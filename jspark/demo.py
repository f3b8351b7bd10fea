"""`jspark demo`: one model answers a few questions with and without speculation, side by side.

Knows: what is shown, and how the two arms are timed fairly. Does not know: how tokens come about (llm.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import arg

import jspark
from jspark.config import DType
from jspark.errors import UserError
from jspark.request import SamplingParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jspark.llm import LLM, Output
    from jspark.loading import Target

#: Code is easy to foresee, poetry is not.
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "How do I make a good cup of tea?",
    "Write four lines about a fox who crosses a frozen river.",
)

#: γ on a CPU: there every drafted token takes time of its own, and later ones are seldom accepted.
_CPU_BLOCK_SIZE = 3

#: The drafter that comes with the package, in records.
_SHIPPED = "shipped"


@dataclass(frozen=True)
class Demo:
    """Answer three questions with speculative decoding and again without, and compare."""

    max_new_tokens: int = 48
    """Tokens an answer has at most."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    model_path: str = "smollm2-135m"
    """The target; it needs a chat template."""
    speculative_draft_model_path: Annotated[
        str | None, arg(metavar="PATH", help_behavior_hint="(default: the model's own, else untrained)")
    ] = None
    """The drafter's folder, or `untrained` for one of random weights."""
    speculative_dspark_block_size: Annotated[
        int | None,
        arg(metavar="INT", help_behavior_hint="(default: 3 on the CPU with our own drafter, else the drafter's)"),
    ] = None
    """Drafted tokens a step, γ."""
    svg: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Also writes what was shown as a picture."""
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Also writes the figures as JSON, and their plot beside it."""

    def run(self) -> int:
        """Shows the demo; 1 when float32 answers differ."""
        from jspark.bench import report

        if self.output is not None:
            report.check_output(Path(self.output))
        console = Console(record=self.svg is not None, highlight=False)
        console.width = min(console.width, 100)
        # On a console of its own: a picture of the session would keep every frame of it.
        waiting = Console(stderr=True)
        started = time.perf_counter()
        with waiting.status("loading"):
            arms, chats = self._load()
            loading = time.perf_counter() - started
        target = next(iter(arms.values())).target
        device = target.mesh.devices.flat[0]
        where = f"{os.cpu_count()} CPU cores" if _on_a_cpu(target) else device.device_kind
        console.print(f"[bold]jspark {jspark.__version__}[/] · {target.name} in {target.dtype} on {where}")
        console.print(f"weights of target and drafter ready in {loading:.1f} s", style="dim")
        params = SamplingParams(temperature=0.0, max_tokens=self.max_new_tokens)
        with waiting.status("compiling"), cache_hits() as hits:
            for llm in arms.values():
                _warm_up(llm, chats, params)
        reports = [llm.engine.programs.report for llm in arms.values()]
        console.print(
            f"{sum(r.programs for r in reports)} programs ready in {sum(r.seconds for r in reports):.1f} s: "
            f"{len(hits)} found in the cache, the rest compiled",
            style="dim",
        )
        outputs: dict[str, list[Output]] = {name: [] for name in arms}
        equal = True
        for question, chat in zip(QUESTIONS, chats, strict=True):
            console.print()
            console.print(Text.assemble(("you ▸ ", "bold cyan"), (question, "bold")))
            for name, llm in arms.items():
                outputs[name].append(_answer(console, name, llm, chat, params))
            latest = [own[-1] for own in outputs.values()]
            equal &= _compare(console, *latest)
        console.print()
        console.print(_table(outputs))
        console.print(self._verdict(outputs, equal, target.dtype))
        if self.svg is not None:
            _save_svg(console, Path(self.svg))
        if self.output is not None:
            record = report.describe("demo", report.command_line("jspark demo", self), target.mesh)
            record["results"] = {
                "model": target.name,
                "dtype": target.dtype,
                "drafter": self._drafter,
                "block_size": next(iter(arms.values())).engine.block_size,
                "answers_equal": equal,
                "load_seconds": loading,
                "programs": sum(r.programs for r in reports),
                "programs_from_cache": len(hits),
                "compile_seconds": sum(r.seconds for r in reports),
                "arms": {name: _figures(own) for name, own in outputs.items()},
                "questions": [
                    {
                        "question": question,
                        "speed_up": _speed_up([ours], [plain]),
                        "arms": {name: _figures([own[i]]) for name, own in outputs.items()},
                    }
                    for i, (question, ours, plain) in enumerate(zip(QUESTIONS, *outputs.values(), strict=True))
                ],
            }
            report.save(record, Path(self.output), lambda axes: draw(record, axes))
        return 0 if equal or target.dtype != "float32" else 1

    @property
    def _drafter(self) -> str:
        """The drafter's folder, or what stands for one."""
        if self.speculative_draft_model_path is not None:
            return self.speculative_draft_model_path
        from jspark.checkpoint.shipped import shipped_drafter

        return _SHIPPED if shipped_drafter(self.model_path, "DSPARK") else "untrained"

    def _load(self) -> tuple[dict[str, LLM], list[list[int]]]:
        """The arms by name, on the same weights, and the questions as token ids."""
        from jspark.llm import LLM
        from jspark.loading import load_target

        target = load_target(self.model_path, self.dtype)
        chats = [target.chat_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
        needed = max(map(len, chats)) + self.max_new_tokens
        if needed > target.config.max_position:
            raise UserError(
                f"{self.max_new_tokens} new tokens do not fit in a context of {target.config.max_position}; "
                "ask for fewer"
            )
        # Rounded up, so that a few tokens more or less find the same programs in the cache.
        context = min(-(-needed // 128) * 128, target.config.max_position)
        sizes: dict[str, Any] = {"max_running_requests": 1, "context_length": context}
        own = self._drafter == _SHIPPED
        size = self.speculative_dspark_block_size
        if size is None and self.speculative_draft_model_path is None and _on_a_cpu(target):
            size = _CPU_BLOCK_SIZE
        drafting: dict[str, Any] = sizes | ({} if size is None else {"block_size": size})
        # Whole blocks, so that what is shown does not depend on whether a cost table was measured here once.
        draft, algorithm = (None, "DSPARK") if own else (self._drafter, None)
        speculative = LLM(target, draft, algorithm, policy="full", **drafting)
        return {speculative.algorithm: speculative, "plain": LLM(target, **sizes)}, chats

    def _verdict(self, outputs: dict[str, list[Output]], equal: bool, dtype: str) -> Text:
        pace = _speed_up(*outputs.values())
        if equal:
            same = "Same tokens in every answer: speculation changes the speed only."
        elif dtype == "float32":
            same = "The answers differ, which float32 must not; please report this."
        else:
            same = f"Rounding in {dtype} decided a close call; with --dtype float32 the answers are equal."
        told = "" if pace is None else f" Here it is {pace:.2f} times as fast as plain decoding."
        if self._drafter == "untrained":
            told += (
                " This drafter is untrained: its guesses are nearly all wrong and only cost time. With "
                "such a drafter losslessness is all there is to see."
            )
        return Text(same + told)


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """A list that grows by one entry for each program found in the persistent compilation cache."""
    import jax

    hits: list[str] = []
    active = True

    def listen(event: str, **_: object) -> None:
        if active and event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        active = False


def _warm_up(llm: LLM, chats: list[list[int]], params: SamplingParams) -> None:
    """Compiles all that the answers need: every prompt's prefill, and the longest context."""
    short = replace(params, max_tokens=min(3, params.max_tokens or 3))
    full = replace(params, ignore_eos=True)
    longest = max(chats, key=len)
    llm.generate(chats, [full if chat is longest else short for chat in chats])


def _answer(console: Console, name: str, llm: LLM, chat: list[int], params: SamplingParams) -> Output:
    """Streams one answer to the screen."""
    main = name != "plain"
    console.print(Text(f"{name} ▸ ", "bold green" if main else "bold dim"), end="")
    printer = WrappedPrinter(console, indent=len(name) + 3, style="" if main else "dim")
    for delta in llm.stream(chat, params):
        printer.write(delta.text)
        if delta.output:
            printer.close()
            return delta.output
    raise AssertionError("a stream ends with an output")


class WrappedPrinter:
    """Prints a growing text, broken between words; a word is printed when the next one begins."""

    def __init__(self, console: Console, indent: int, style: str):
        self._console, self._style = console, style
        self._column = self._indent = indent
        self._word = ""

    def write(self, text: str) -> None:
        """Prints all complete words."""
        for character in text:
            if character.isspace():
                self._flush()
            if character == "\n":
                self._break()
            else:
                self._word += character

    def close(self) -> None:
        """Prints the last word and ends the line."""
        self._flush()
        self._console.print()

    def _flush(self) -> None:
        word = Text(self._word, self._style)
        if self._column + word.cell_len > self._console.width:
            self._break()
            word = Text(self._word.lstrip(), self._style)
        self._console.print(word, end="", soft_wrap=True)
        self._column += word.cell_len
        self._word = ""

    def _break(self) -> None:
        self._console.print("\n" + " " * self._indent, end="", soft_wrap=True)
        self._column = self._indent


def _compare(console: Console, speculative: Output, plain: Output) -> bool:
    ours, theirs = speculative.output_ids, plain.output_ids
    if ours == theirs:
        pace = _speed_up([speculative], [plain])
        told = "" if pace is None else f", {pace:.2f} times as fast"
        console.print(f"✓ the same {len(ours)} tokens{told}", style="green")
        return True
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    console.print(f"✗ token {at + 1} differs", style="red")
    return False


def _rate(outputs: list[Output]) -> float:
    """Tokens a second after the first token of each answer."""
    return sum(o.completion_tokens - 1 for o in outputs) / max(sum(o.decode_seconds for o in outputs), 1e-9)


def _speed_up(speculative: list[Output], plain: list[Output]) -> float | None:
    """Rate over rate; None for answers of one token."""
    rate = _rate(plain)
    return _rate(speculative) / rate if rate else None


def _on_a_cpu(target: Target) -> bool:
    return target.mesh.devices.flat[0].platform == "cpu"


def _figures(outputs: list[Output]) -> dict[str, Any]:
    """What is told of an arm: tokens after the first, per step and per second, and the windows of its steps."""
    steps = sum(o.steps for o in outputs)
    return {
        "accept_length": sum(o.completion_tokens - 1 for o in outputs) / steps if steps else None,
        "tokens_per_second": _rate(outputs),
        "steps": steps,
        "window_histogram": [sum(column) for column in zip(*(o.window_histogram for o in outputs), strict=True)],
        "prefill_ms": sum(o.prefill_seconds for o in outputs) / len(outputs) * 1e3,
    }


def _table(outputs: dict[str, list[Output]]) -> Table:
    table = Table("", "accept length τ", "tokens/s", "steps", "steps by window length", "prefill", box=None)
    for name, own in outputs.items():
        figures = _figures(own)
        length = figures["accept_length"]
        table.add_row(
            Text(name, "bold"),
            "–" if length is None else f"{length:.2f}",
            f"{figures['tokens_per_second']:.1f}",
            str(figures["steps"]),
            ", ".join(f"{length}: {n}" for length, n in enumerate(figures["window_histogram"]) if n),
            f"{figures['prefill_ms']:.0f} ms",
        )
    return table


def draw(record: dict[str, Any], axes: Axes) -> None:
    """Tokens a second of the arms in a record of this command."""
    results = record["results"]
    arms = {name: arm["tokens_per_second"] for name, arm in reversed(results["arms"].items())}
    bars = axes.barh(list(arms), list(arms.values()), height=0.5, color=["#a9b4c2", "#2a9d8f"])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.1)
    axes.set_xlabel("tokens/s after the first token, one request, greedy")
    axes.set_title(
        f"{results['model']} in {results['dtype']} on {record['device']['kind']}, {results['drafter']} drafter",
        loc="left",
    )


def _save_svg(console: Console, path: Path) -> None:
    try:
        # Without the fonts it would fetch: a reader's own monospace font will do.
        svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="jspark demo"), flags=re.DOTALL)
        path.write_text(svg, encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} cannot be written ({e.strerror}); choose another place for the picture") from None
    Console(stderr=True, highlight=False).print(f"picture written to {path}", style="dim", soft_wrap=True)
