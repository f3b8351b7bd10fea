"""`jspark data`: training text for a drafter, written by its target.

Knows: flags and what is printed. Does not know: how text is written, selected or stored (train/).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from jspark.config import DType
from jspark.errors import UserError


@dataclass(frozen=True)
class Data:
    """Have a target write its own training text: questions in its chat template, and its answers."""

    model_path: str
    """The target: a Hugging Face folder, a GGUF file, or the built-in smollm2-135m."""
    output: Annotated[str, arg(metavar="FOLDER")]
    """The folder of the text; the same command again goes on with it."""
    tokens: int = 1_000_000
    """Tokens to keep, questions included."""
    prompts: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: it asks itself)")] = None
    """JSONL with "prompt", "turns" or "messages": these are answered, once each."""
    conversations: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """JSONL with "messages": nothing is written, these are stored, their assistant turns to be trained on."""
    exclude: Annotated[tuple[str, ...], arg(metavar="FILE")] = ()
    """Evaluation files: text that shares 13 tokens in a row with any of them is left out."""
    rows: Annotated[int, arg(help_behavior_hint="(default: 1024, 16 on the CPU)")] = 0
    """Conversations written at the same time."""
    max_question_tokens: int = 160
    """A question is ended here."""
    max_answer_tokens: int = 512
    """An answer is ended here."""
    question_temperatures: str = "1.0,0.8"
    """Temperatures of questions, taken in turns."""
    answer_temperatures: str = "1.0,0.0,1.0,0.7"
    """Temperatures of answers, taken in turns; 0 is greedy."""
    free_questions: int = 1
    """Questions without a given beginning for each one with (mathematics, code, writing, …)."""
    stop_loops: int = 48
    """An answer ends after so many tokens that repeat an earlier stretch of it word for word."""
    dtype: Annotated[
        DType | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint="(default: float32 on the CPU, bfloat16 elsewhere)"),
    ] = None
    """Of weights and KV cache."""
    context_length: int = 1024
    """Longest conversation with --prompts or --conversations."""
    seconds: float = 0.0
    """Stop after this time with what there is; 0 is no limit."""
    part_size: int = 4096
    """Conversations a file; what a killed run had not put into one is written again."""
    seed: int = 0
    """Another seed gives other text."""

    def run(self) -> int:
        """Writes the text."""
        from jspark.train import check_installed

        check_installed()
        from jspark import programs
        from jspark.bench.report import show
        from jspark.loading import load_target
        from jspark.train import conversations, write_text
        from jspark.train.attention import implementation
        from jspark.train.select import Selection
        from jspark.train.writer import Writing

        if self.prompts is not None and self.conversations is not None:
            raise UserError(
                "--prompts are answered and --conversations are stored as they are; give one of the two"
            )
        for name in ("tokens", "max_question_tokens", "max_answer_tokens", "stop_loops", "part_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        questions = _temperatures(self.question_temperatures, "--question-temperatures")
        answers = _temperatures(self.answer_temperatures, "--answer-temperatures")
        programs.use_compilation_cache()
        target = load_target(self.model_path, self.dtype)
        device = target.mesh.devices.flat[0]
        longest = min(self.context_length, target.config.max_position)
        selection = Selection()
        for path in self.exclude:
            selection.exclude(conversations.evaluation_tokens(target, Path(path)))
        folder = write_text.text_folder(Path(self.output), target, self._source(), self.part_size)
        if self.conversations is not None:
            selection.near = False
            given = conversations.given_conversations(target, Path(self.conversations), longest)
            report = write_text.store_conversations(target, given, folder, selection)
        else:
            if self.prompts is not None:
                selection.near = False
                script = conversations.given_prompts(target, Path(self.prompts), longest)
                answer = min(self.max_answer_tokens, longest - int(script.lengths.max()))
            else:
                script = conversations.self_written(target, conversations.openings(), self.free_questions)
                selection.min_question, selection.template = 4, script.shared
                answer = self.max_answer_tokens
            writing = Writing(
                rows=self.rows or (16 if device.platform == "cpu" else 1024),
                max_question=self.max_question_tokens,
                max_answer=answer,
                question_temperatures=questions,
                answer_temperatures=answers,
                loop=self.stop_loops,
                stop_ids=target.eos_token_ids,
                seed=self.seed,
                attention=implementation(device, target.dtype),
            )
            report = write_text.write_text(target, script, writing, folder, selection, self.tokens, self.seconds)
        show(f"{self.output}: text of {target.name}", ("", ""), write_text.as_table(report), ())
        return 0

    def _source(self) -> dict[str, Any]:
        """The flags that make the text what it is."""
        passing = ("output", "tokens", "model_path", "rows", "dtype", "seconds", "part_size")
        values = {k: v for k, v in asdict(self).items() if k not in passing}
        return values | {"exclude": [Path(p).name for p in self.exclude]}


def _temperatures(text: str, flag: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or any(not 0 <= t <= 10 for t in values):
        raise UserError(f"{flag} {text!r} is no list of temperatures from 0 to 10; write 1.0,0.7")
    return values
