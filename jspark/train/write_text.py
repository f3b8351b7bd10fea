"""`jspark data`'s work: writes text into a folder until there is enough, and says how it went.

Knows: how writer, selection and folder fit together, and how a stopped run goes on.
Does not know: flags (cli_data.py), or how any of the three works.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jspark.errors import UserError
from jspark.loading import Target
from jspark.train.select import Selection
from jspark.train.text import Conversation, TextFolder
from jspark.train.writer import Script, Writer, Writing, Written

_ENDLESS = 2**30


def describe(target: Target, source: Mapping[str, Any]) -> dict[str, Any]:
    """What a text folder is made with: a drafter trained on it must belong to the same target."""
    return {
        "format": 1,
        "target": target.name,
        "vocab_size": target.config.vocab_size,
        "dtype": target.dtype,
        **source,
    }


def write_text(
    target: Target,
    script: Script,
    writing: Writing,
    folder: TextFolder,
    selection: Selection,
    tokens: int,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Writes conversations until `tokens` are kept, or all scripts are answered, or `seconds` are over.

    Returns the report, which is stored too. Raises UserError for a folder of other text, or a full disk.
    """
    held = folder.open()
    for c in held:
        start = int(c.spans[0, 0])
        selection.keep(Written(c.id, c.tokens, start, c.tokens[-1] in writing.stop_ids), known=True)
    before = selection.tokens
    done = {c.id for c in held}
    next_id = max(done, default=-1) + 1
    # What a killed run had begun or lost; a refused one is written again, and refused again.
    left = [i for i in range(next_id) if i not in done]
    count = _ENDLESS if script.asks else len(script.lengths)
    writer = Writer(target.model, target.config, script, writing)
    check_memory(writer, target)
    started, written, conversations, first = time.perf_counter(), 0, 0, None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("writing text", total=tokens, completed=selection.tokens, rate=0.0)
        enough = selection.tokens >= tokens
        rows = writing.rows
        batches = [left[i : i + rows] for i in range(0, len(left), rows)] or [[]]
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            limit = count if last else next_id
            if enough:
                break
            with contextlib.closing(writer.write(batch, next_id, limit)) as stream:
                for finished in stream:
                    first = first or time.perf_counter()
                    for w in finished:
                        written, conversations = written + len(w.tokens), conversations + 1
                        if selection.keep(w):
                            spans = np.array([[w.answer_start, len(w.tokens)]])
                            folder.add(Conversation(w.id, w.tokens, spans))
                    elapsed = time.perf_counter() - started
                    progress.update(task, completed=selection.tokens, rate=written / elapsed)
                    over = bool(seconds) and elapsed > seconds
                    enough = selection.tokens >= tokens or over
                    if enough:
                        break
    elapsed = time.perf_counter() - started
    steady = time.perf_counter() - (first or started)
    report = selection.report() | {
        "target": target.name,
        "written_tokens": written,
        "written_conversations": conversations,
        "from_earlier_runs": before,
        "seconds": elapsed,
        "tokens_per_second": written / elapsed,
        "kept_tokens_per_second": (selection.tokens - before) / elapsed,
        "decode_steps": writer.steps,
        "row_tokens_per_second": writer.steps * writing.rows / elapsed,
        "seconds_after_first_call": steady,
        "rows": writing.rows,
        "kv_cache_bytes": writer.cache_bytes,
        "device": str(next(iter(target.mesh.devices.flat)).device_kind),
    }
    if not selection.kept:
        raise UserError("no conversation was kept; allow shorter answers, or look at what the target writes")
    folder.close(report)
    return report


def check_memory(writer: Writer, target: Target) -> None:
    """Raises UserError where the caches of so many rows would not fit the device."""
    memory = target.mesh.devices.flat[0].memory_stats() or {}
    room = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
    if memory and writer.cache_bytes > room:
        raise UserError(
            f"the rows' caches take {writer.cache_bytes / 1e9:.1f} GB and {room / 1e9:.1f} GB are free; lower "
            "--rows or --max-answer-tokens"
        )


def store_conversations(
    target: Target, conversations: Iterable[Conversation], folder: TextFolder, selection: Selection
) -> dict[str, Any]:
    """Stores given conversations; those that overlap with an evaluation text or were there before are left out."""
    done = {c.id for c in folder.open()}
    for c in conversations:
        written = Written(c.id, c.tokens, int(c.spans[0, 0]), True)
        if selection.keep(written, known=c.id in done) and c.id not in done:
            folder.add(c)
    if not selection.kept:
        raise UserError("no conversation was kept; the file holds none, or only what evaluation texts hold")
    report = selection.report() | {"target": target.name}
    folder.close(report)
    return report


def text_folder(path: Path, target: Target, source: Mapping[str, Any], part_size: int) -> TextFolder:
    """The folder to write to."""
    return TextFolder(path, describe(target, source), part_size)


def as_table(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """The report's figures for people."""
    refused = ", ".join(f"{v:,} {k.replace('_', ' ')}" for k, v in report["refused"].items() if v) or "none"
    length = report["answer_length"]
    rows = [
        ("conversations", f"{report['conversations']:,}"),
        ("tokens", f"{report['tokens']:,}, of answers {report['answer_tokens']:,}"),
        ("answer length", f"{length['mean']:.0f} (p10 {length['p10']:.0f}, p90 {length['p90']:.0f})"),
        ("looping text", f"{report['looping_share']:.1%} of answer tokens"),
        ("left out", refused),
    ]
    if "tokens_per_second" in report:
        rows.append(("speed", f"{report['tokens_per_second']:,.0f} tokens/s written"))
    return rows
