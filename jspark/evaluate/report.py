"""What an evaluation and a calibration leave behind: JSON, Markdown, a table, pictures.

Knows: the record's form and how figures are written. Does not know: how they were computed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Picture
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def write_json(path: Path, record: Record) -> None:
    """As strict JSON: what is not a number becomes null."""
    write_text(path, json.dumps(_finite(record), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def save_picture(picture: Picture, path: Path) -> None:
    """As PNG, without the two sides of the frame that say nothing."""
    for axes in picture.axes:
        axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=150)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────

Rows = tuple[str, list[str], list[list[str]]]


def tables(results: Sequence[Mapping[str, Any]]) -> Iterator[Rows]:
    """(title, header, rows) of everything worth a look, temperature by temperature."""
    for result in results:
        at = f"temperature {result['temperature']:g}"
        arms = result["arms"]
        sets = list(next(iter(arms.values()))["data_sets"])
        for key, what in (("tau", "accept length τ"), ("loop_free_tau", "loop-free τ")):
            rows = []
            for name, arm in arms.items():
                cells = [interval(arm["data_sets"][d][key]) for d in sets]
                rows.append([name, *cells, interval(arm["macro"][key]), number(arm["macro"][key]["value"] - 1)])
            yield f"{what}, {at}", ["", *sets, "macro", "macro − 1"], rows
        rows = []
        for name, arm in arms.items():
            if "tokens_per_second" in arm:
                own = [number(arm["data_sets"][d]["tokens_per_second"], 0) for d in sets]
                speed_up = number(arm.get("speed_up", math.nan))
                rows.append([name, *own, number(arm["tokens_per_second"], 0), speed_up])
        yield f"tokens/s, {at}", ["", *sets, "all", "speed-up"], rows
        rows = [
            [
                f"{r['of']} over {r['over']}",
                *(
                    percent(r[key]["macro"])
                    for key in ("tau", "tau_minus_1", "loop_free_tau", "loop_free_tau_minus_1")
                ),
            ]
            for r in result["ratios"]
        ]
        if rows:
            header = ["macro gain", "τ", "τ − 1", "loop-free τ", "loop-free τ − 1"]
            yield f"paired by prompt, {at}", header, rows
        drafting = {n: a for n, a in arms.items() if "conditional_acceptance" in a}
        if drafting:
            size = max(len(a["conditional_acceptance"]) for a in drafting.values())
            rows = [[n, *(number(v) for v in a["conditional_acceptance"])] for n, a in drafting.items()]
            yield f"conditional acceptance by position, {at}", ["", *map(str, range(1, size + 1))], rows
        sure = {n: a["confidence"] for n, a in arms.items() if "confidence" in a}
        if sure:
            rows = [
                [n, f"{c['blocks']:,}", *(number(c["pooled"][k], 3) for k in ("auc", "ece", "ece_noise", "brier"))]
                for n, c in sure.items()
            ]
            header = ["prefix survival", "blocks", "AUC", "ECE", "ECE of chance", "Brier"]
            yield f"confidence, {at}", header, rows


def number(value: float, digits: int = 2) -> str:
    """A number for people; – for none."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def interval(figure: Mapping[str, float]) -> str:
    """An estimate with its interval."""
    if not math.isfinite(figure["value"]):
        return "–"
    return f"{figure['value']:.2f} [{number(figure['low'])}, {number(figure['high'])}]"


def percent(figure: Mapping[str, float]) -> str:
    """A gain with its interval, in per cent."""
    if not math.isfinite(figure["value"]):
        return "–"
    low, high = (f"{figure[end]:+.1%}" if math.isfinite(figure[end]) else "–" for end in ("low", "high"))
    return f"{figure['value']:+.1%} [{low}, {high}]"


def show(all_tables: Iterator[Rows], notes: Sequence[str]) -> None:
    """Prints tables, and under them one line a note."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no width that a table must keep to
    for title, header, rows in all_tables:
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row, *[""] * (len(header) - len(row)))
        console.print(table)
        console.print()
    for note in notes:
        console.print(note, style="dim", markup=False)


def markdown(title: str, all_tables: Iterator[Rows], notes: Sequence[str], pictures: Sequence[str]) -> str:
    """The same as a Markdown document."""
    lines = [f"# {title}", ""]
    for heading, header, rows in all_tables:
        lines += [f"## {heading}", "", f"| {' | '.join(header)} |", f"| --- {'| ---: ' * (len(header) - 1)}|"]
        lines += [f"| {' | '.join([*row, *[''] * (len(header) - len(row))])} |" for row in rows]
        lines.append("")
    lines += [f"![{name}]({name})\n" for name in pictures]
    return "\n".join([*lines, *(f"* {note}" for note in notes), ""])
