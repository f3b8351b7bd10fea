"""`jspark eval`: drafters measured as the papers do, on any data sets.

Knows: flags and what is said at the end. Does not know: how anything is measured (evaluate/).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from jspark.config import DType
from jspark.errors import UserError

if TYPE_CHECKING:
    from jspark.evaluate.run import Drafter

_RESERVED = ("plain", "prompt-lookup", "oracle")


@dataclass(frozen=True)
class Eval:
    """Measure drafters: accept length τ with intervals, loop-free τ, acceptance by position, tokens/s.

    Every run has plain decoding for the speed, prompt lookup as the floor (n-gram drafting without a model, worked
    out from plain decoding's text), and an oracle whose drafts are all accepted as the ceiling.
    """

    model_path: str
    """The target: a Hugging Face folder, a GGUF file, or the built-in smollm2-135m."""
    data: Annotated[tuple[str, ...], arg(metavar="[NAME=]FILE")]
    """A data set as JSONL: {"turns": ["…", …]} through the chat template, every turn asked after the answer to the
    one before; or {"prompt": "…"}, continued as it is. May be given several times."""
    speculative_draft_model_path: Annotated[tuple[str, ...], arg(metavar="[NAME=]PATH")] = ()
    """A drafter's folder; several are compared on the same prompts."""
    speculative_dspark_confidence_sts_path: Annotated[tuple[str, ...], arg(metavar="[NAME=]FILE")] = ()
    """Calibration of the drafter of that name, for the figures about its confidence."""
    temperature: Annotated[tuple[float, ...], arg(metavar="FLOAT", help_behavior_hint="(default: 1)")] = ()
    """0 is greedy; may be given several times."""
    max_new_tokens: int = 512
    """Tokens an answer has at most."""
    limit: Annotated[int, arg(help_behavior_hint="(default: all)")] = 0
    """Lines of each data set, from its beginning."""
    first_turn_only: bool = False
    """Asks the first turn of each line only."""
    output: str = "eval"
    """A folder for record, report and pictures. Parts are kept there: the same command goes on where it was."""
    seed: int = 0
    """Of sampled answers; each prompt has a seed of its own, the same for all drafters."""
    speculative_sampling: Literal["rejection", "coupled"] = "rejection"
    """The papers' sampler, or the one that keeps plain decoding's tokens and accepts less."""
    ignore_eos: bool = False
    """Goes on after the model's own end of text."""
    speculative_dspark_block_size: Annotated[int, arg(help_behavior_hint="(default: the drafter's)")] = 0
    """Drafted tokens a step, γ, of all drafters."""
    concurrency: Annotated[int, arg(help_behavior_hint="(default: chosen for the device)")] = 0
    """Prompts that are answered at the same time."""
    context_length: Annotated[int, arg(help_behavior_hint="(default: what the prompts need)")] = 0
    """Longest conversation, in tokens."""
    chunked_prefill_size: int = 512
    """Prompt tokens that a step takes in beside the answers in progress."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    disable_overlap_schedule: Annotated[bool, arg(help_behavior_hint="(default: only on CPUs)")] = False
    """Waits for the results of a step before the next one is begun; the tokens are the same."""

    def run(self) -> int:
        """Measures what is not measured yet, shows and saves."""
        from jspark.bench.report import command_line, describe
        from jspark.evaluate import figures, report, text_shape
        from jspark.evaluate.data import read_data
        from jspark.evaluate.run import Settings, evaluate

        if not self.data:
            raise UserError("there is no data set; pass --data NAME=FILE.jsonl")
        if self.limit < 0:
            raise UserError(f"--limit is {self.limit}; it must be 0 (all lines) or positive")
        data = [read_data(spec, self.limit, self.first_turn_only) for spec in self.data]
        _distinct([d.name for d in data], "data sets")
        temperatures = self.temperature or (1.0,)
        _distinct([f"{t:g}" for t in temperatures], "temperatures")
        settings = Settings(
            model_path=self.model_path,
            drafters=self._drafters(),
            temperatures=temperatures,
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            speculative_sampling=self.speculative_sampling,
            ignore_eos=self.ignore_eos,
            block_size=self.speculative_dspark_block_size,
            concurrency=self.concurrency,
            context_length=self.context_length,
            chunked_prefill_size=self.chunked_prefill_size,
            dtype=self.dtype,
            overlap=False if self.disable_overlap_schedule else None,
        )
        folder = Path(self.output)
        _check_folder(folder)
        with progress() as tell:
            target, results = evaluate(settings, data, folder, tell)
        record = describe("eval", command_line("jspark eval", self), target.mesh)
        record |= {
            "target": target.name,
            "dtype": target.dtype,
            "rules": {
                "tau": "tokens a target step after an answer's first token, the bonus counted; 95% intervals from "
                "2,000 resamples of prompts, the macro figure is the mean over data sets",
                "loop_free_tau": f"steps inside a loop left out: {text_shape.LOOP_RULE}",
                "prompt-lookup": f"{text_shape.LOOKUP_RULE}; replayed on plain decoding's text",
                "oracle": "every draft accepted, on plain decoding's text",
                "tokens_per_second": "of whole batches with prefill, compilation left out, arms in turns",
            },
            "results": results,
        }
        report.write_json(folder / "results.json", record)
        pictures = figures.draw_all(results, folder)
        notes = [f"{name}: {rule}" for name, rule in record["rules"].items()]
        title = f"Drafters of {target.name} at {self.max_new_tokens} new tokens"
        document = report.markdown(title, report.tables(results), [f"`{record['command']}`", *notes], pictures)
        report.write_text(folder / "report.md", document)
        report.show(report.tables(results), [*notes, f"saved in {folder}"])
        return 0

    def _drafters(self) -> tuple[Drafter, ...]:
        from jspark.calibration import read_temperatures
        from jspark.evaluate.run import Drafter

        named = [_named(spec) for spec in self.speculative_draft_model_path]
        paths = {name or Path(path).name: path for name, path in named}
        _distinct([name or Path(path).name for name, path in named], "drafters")
        taken = [name for name in paths if name in _RESERVED]
        if taken:
            raise UserError(f"a drafter cannot be called {taken[0]!r}; give it a name: NAME=PATH")
        temperatures = {}
        for spec in self.speculative_dspark_confidence_sts_path:
            name, path = _named(spec)
            if name is None and len(paths) == 1:
                name = next(iter(paths))
            if name not in paths:
                raise UserError(
                    f"the calibration {spec!r} names none of the drafters ({', '.join(paths) or 'there are none'}"
                    "); write NAME=FILE"
                )
            temperatures[name] = read_temperatures(path)
        return tuple(Drafter(name, path, temperatures.get(name)) for name, path in paths.items())


def _named(spec: str) -> tuple[str | None, str]:
    """(name, path) of `NAME=PATH`; no name for a path alone."""
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", spec)
    return (found[1], found[2]) if found else (None, spec)


def _distinct(names: Sequence[str], what: str) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"two {what} are called {twice[0]!r}; drop one, or give each a name of its own")


def _check_folder(folder: Path) -> None:
    try:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"the folder {folder} cannot be made ({e.strerror}); choose another --output") from None


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; what it gives is called with what is running, how much is ready, and of how much."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def tell(what: str, done: int, total: int) -> None:
            if not done and not console.is_terminal:
                console.print(what, highlight=False, soft_wrap=True)
            bar.update(task, description=what, completed=done, total=total)

        yield tell
