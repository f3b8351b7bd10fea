"""How `jspark bench engine` shows its cells: tables on the screen, and one picture.

Knows: the form of the results. Does not know: how anything was measured.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from jspark.bench import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Windows are drawn of this arm.
_MAIN = "compact"


def show(results: report.Record) -> None:
    """A table for each cell."""
    header = ("arm", "tokens/s", "× none", "each", "τ", "window", "used", "step ms", "host", "idle", "between")
    for cell in results["cells"]:
        rows = []
        for name, arm in cell["arms"].items():
            tau, device = arm["accept_length"], arm["device"]
            rows.append(
                [
                    name,
                    f"{arm['tokens_per_second']:.1f}",
                    f"{arm['over_none']:.2f}",
                    _number(arm["request_tokens_per_second"], ".1f"),
                    _number(tau and tau["value"], ".2f"),
                    _number(arm["mean_window"], ".2f"),
                    _number(arm["utilisation"], ".0%"),
                    _number(arm["step_ms"], ".1f"),
                    f"{arm['host_share']:.1%}",
                    _number(device and device["idle_share"], ".1%"),
                    _number(device and device["between_launches_share"], ".1%"),
                ]
            )
        title = f"concurrency {cell['concurrency']}, temperature {cell['temperature']:g}"
        report.show(title, header, rows, ())
    notes = f"{results['model']}, {results['dtype']}, {results['drafter']} drafter, {results['workload']} workload"
    report.show(notes, (), (), _notes(results))


def _notes(results: report.Record) -> list[str]:
    notes = [
        "each: tokens/s of a request, median; used: accepted drafts over those of whole blocks; idle: the device, "
        "and between two launches"
    ]
    if not results["complete"]:
        notes.append("interrupted, or out of time: not all cells were measured")
    return notes


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw(results: report.Record, figure: Figure) -> None:
    """A row a temperature: the frontier, windows by kind of prompt, and how windows shrink as requests come."""
    temperatures = [
        (temperature, list(cells)) for temperature, cells in groupby(results["cells"], lambda c: c["temperature"])
    ]
    panels = figure.subplots(len(temperatures), 3, squeeze=False)
    for row, (temperature, cells) in zip(panels, temperatures, strict=True):
        _frontier(cells, row[0])
        _kinds(cells, row[1])
        _windows(cells, row[2])
        row[0].set_title(f"temperature {temperature:g}", loc="left")
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{results['model']}, {results['dtype']}, {results['drafter']} drafter, γ {results['block_size']}",
        x=0.01,
        ha="left",
    )


def _frontier(cells: list[dict[str, Any]], axes: Any) -> None:
    for name in cells[0]["arms"]:
        points = [
            (c["arms"][name]["request_tokens_per_second"], c["arms"][name]["tokens_per_second"]) for c in cells
        ]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel("tokens/s of a request, median")
    axes.set_ylabel("tokens/s of the engine")
    axes.legend(frameon=False, fontsize="x-small")


def _kinds(cells: list[dict[str, Any]], axes: Any) -> None:
    at = [str(c["concurrency"]) for c in cells]
    for kind in sorted({kind for c in cells for kind in c["arms"][_MAIN]["by_kind"]}):
        own = [c["arms"][_MAIN]["by_kind"].get(kind, {}).get("mean_window") for c in cells]
        axes.plot(at, own, marker="o", markersize=3, label=kind)
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"mean window, {_MAIN}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="x-small")


def _windows(cells: list[dict[str, Any]], axes: Any) -> None:
    """Budget against concurrency: the windows of a step together, and beside it the tokens that it commits."""
    cells = [c for c in cells if c["arms"][_MAIN]["accept_length"] is not None]
    at = [c["concurrency"] for c in cells]
    own = [c["arms"][_MAIN] for c in cells]
    axes.plot(
        at, [c * a["mean_window"] for c, a in zip(at, own, strict=True)], "o-", label="drafts verified a step"
    )
    committed = [c * a["accept_length"]["value"] for c, a in zip(at, own, strict=True)]
    axes.plot(at, committed, "s--", label="tokens committed a step")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("concurrency")
    axes.set_ylabel(f"tokens, {_MAIN}")
    axes.legend(frameon=False, fontsize="x-small")
