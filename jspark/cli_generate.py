"""`jspark generate`: prompts from flags and files, answers on stdout, everything else on stderr.

Knows: flags, prompt files, how answers are printed. Does not know: how they come about (llm.py).
"""

from __future__ import annotations

import contextlib
import json as json_format
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from tyro.conf import arg

from jspark.errors import UserError
from jspark.flags import (
    EngineFlags,
    ModelFlags,
    SamplingFlags,
    SpeculationFlags,
    StructureFlags,
    open_llm,
    token_ids,
)

if TYPE_CHECKING:
    from jspark.llm import LLM, Output
    from jspark.request import SamplingParams

Prompt = str | list[int]


@dataclass(frozen=True)
class Generate:
    """Answer prompts: text streams to stdout, figures go to stderr."""

    model: ModelFlags
    prompt: Annotated[tuple[str, ...], arg(metavar="TEXT")] = ()
    """A text to continue. Answers come in this order: --prompt, --token-ids, --prompt-file."""
    token_ids: Annotated[tuple[str, ...], arg(metavar="ID,ID,…")] = ()
    """A prompt as token ids."""
    prompt_file: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """One prompt a line; in a .jsonl file one object a line, with "prompt" (a text or a list of token ids) or
    "turns" (a list of texts, of which the first is asked)."""
    chat: bool = False
    """Puts each prompt as a user's message into the model's chat template."""
    json: bool = False
    """One JSON object a prompt on stdout, in order, and nothing else there."""
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    structure: StructureFlags = field(default_factory=StructureFlags)
    speculation: SpeculationFlags = field(default_factory=SpeculationFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        """Answers all prompts."""
        prompts = self._prompts()
        if self.model.chat_template is not None and not self.chat:
            raise UserError("--chat-template does nothing without --chat; add --chat, or drop it")
        params = replace(self.sampling.params(), structured_outputs=self.structure.structured_outputs())
        for flag, k in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
            if k is not None and not self.json:
                raise UserError(f"{flag} shows in JSON only; add --json, or drop it")
        llm = open_llm(self.model, self.speculation, self.engine)
        asked: list[Prompt] = [self._chat(llm, p) for p in prompts] if self.chat else prompts
        # What the drafter's trial compiled is not part of this.
        ready, started = llm.engine.programs.report.seconds, time.perf_counter()
        if self.json:
            for _, output in _in_order(llm, asked, params):
                print(json_format.dumps(_record(output)), flush=True)
            return 0
        if len(asked) * params.n == 1:
            outputs = [_print_stream(llm, asked[0], params)]
        else:
            outputs = []
            for i, output in _in_order(llm, asked, params):
                print(_block(i, prompts[i], output, params.n), flush=True)
                outputs.append(output)
        compiling = llm.engine.programs.report.seconds - ready
        _print_figures(llm, outputs, time.perf_counter() - started, compiling)
        return 0

    def _prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = [*self.prompt, *(token_ids(text, "--token-ids") for text in self.token_ids)]
        if self.prompt_file is not None:
            prompts += read_prompts(Path(self.prompt_file))
        if not prompts:
            raise UserError("there is no prompt; pass --prompt, --token-ids or --prompt-file")
        return prompts

    @staticmethod
    def _chat(llm: LLM, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            raise UserError(
                "--chat puts texts into the chat template, and one prompt is token ids; drop one of the two"
            )
        if not prompt:
            raise UserError("the prompt is empty; give at least one character")
        return llm.target.chat_ids([{"role": "user", "content": prompt}])


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, empty lines left out; UserError for a file that is no such thing.

    A .jsonl file has one object a line with "prompt" (text or token ids) or "turns" (texts; the first is
    taken); any other file one text a line.
    """
    try:
        # Not splitlines(): a line of JSON may hold other separators inside its strings.
        lines = [line.rstrip("\r") for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, ValueError) as e:  # ValueError: no UTF-8, or a path with a zero byte
        why = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"the prompt file {path} cannot be read ({why}); pass a text file in UTF-8") from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"the prompt file {path} holds no prompt; write one a line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"line {n} of {path}") for n, line in numbered]


def _from_json(line: str, where: str) -> Prompt:
    try:
        value = json_format.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not JSON ({e}); write one object a line") from None
    prompt = None
    if isinstance(value, dict):
        turns = value.get("turns")
        prompt = value.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(t) is int for t in prompt)):
        return prompt
    raise UserError(f'{where} has no prompt; write {{"prompt": "…"}}, {{"prompt": [1, 2]}} or {{"turns": ["…"]}}')


def _in_order(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, Output]]:
    """(index of the prompt, an answer) in the order of the prompts, each as soon as all before it are complete."""
    ready: dict[tuple[int, int], Output] = {}
    expected = deque((i, index) for i in range(len(prompts)) for index in range(params.n))
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    # Answers on the same screen are progress enough, and a moving bar would run through them.
    hidden = not console.is_terminal or sys.stdout.isatty()
    bar = Progress(
        *columns, console=console, transient=True, disable=hidden, redirect_stdout=False, redirect_stderr=False
    )
    with (
        bar as progress,
        contextlib.closing(llm.as_completed(prompts, params)) as completed,
    ):
        task = progress.add_task("answering", total=len(expected))
        for i, output in completed:
            progress.advance(task)
            ready[i, output.index] = output
            while expected and expected[0] in ready:
                key = expected.popleft()
                yield key[0], ready.pop(key)


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> Output:
    with contextlib.closing(llm.stream(prompt, params)) as deltas:
        separator = ""
        for delta in deltas:
            if llm.target.tokenizer:
                print(delta.text, end="", flush=True)
            elif delta.token_ids:
                print(separator + ",".join(map(str, delta.token_ids)), end="", flush=True)
                separator = ","
            if delta.output:
                print()
                return delta.output
    raise AssertionError("a stream ends with an output")


def _block(index: int, prompt: Prompt, output: Output, n: int) -> str:
    """Prompt and answer of one of several, as text."""
    number = f"{index + 1}" if n == 1 else f"{index + 1}.{output.index + 1}"
    asked = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    answer = output.text if output.text is not None else ",".join(map(str, output.output_ids))
    return f"── {number}: {' '.join(asked.split()):.90}\n{answer}\n"


def _record(output: Output) -> dict:
    """What --json prints of an answer."""
    record = asdict(output)
    del record["stop_reason"]
    return {name: value for name, value in record.items() if value is not None or "logprobs" not in name}


def _print_figures(llm: LLM, outputs: Sequence[Output], seconds: float, compiling: float) -> None:
    report = llm.engine.programs.report
    tokens = sum(o.completion_tokens for o in outputs)
    steps = sum(o.steps for o in outputs)
    parts = [f"{tokens} tokens", f"{tokens / max(seconds - compiling, 1e-9):.1f} tokens/s"]
    if steps and llm.algorithm != "NONE":
        parts.append(f"accept length τ {(tokens - len(outputs)) / steps:.2f}")
    parts.append(f"{report.programs} programs made ready in {report.seconds:.1f} s (not in the rate)")
    Console(stderr=True, highlight=False).print(" · ".join(parts), style="dim", soft_wrap=True)
