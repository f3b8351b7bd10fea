"""Pictures of an evaluation and of a calibration.

Knows: the record's form, matplotlib. Does not know: how figures were computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jspark.evaluate.confidence import Bins
from jspark.evaluate.report import save_picture

Results = Sequence[Mapping[str, Any]]


def draw_all(results: Results, folder: Path) -> list[str]:
    """Draws what there is to draw into `folder`; the names of the files."""
    names = ["tau.png"]
    _tau(results, folder / names[0])
    if any("conditional_acceptance" in a for r in results for a in r["arms"].values()):
        names.append("acceptance.png")
        _acceptance(results, folder / names[-1])
    if any("threshold_sweep" in a for r in results for a in r["arms"].values()):
        names.append("thresholds.png")
        _thresholds(results, folder / names[-1])
    return names


def _panels(rows: int, columns: int, width: float, height: float):
    picture = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return picture, picture.subplots(rows, columns, squeeze=False)


def _tau(results: Results, path: Path) -> None:
    """Bars of τ by data set and arm, one panel a temperature; the black dash is loop-free τ."""
    picture, panels = _panels(len(results), 1, 10, 3.6)
    for result, axes in zip(results, panels[:, 0], strict=True):
        # The oracle would squeeze all other bars; it is in the tables.
        arms = {n: a for n, a in result["arms"].items() if n not in ("plain", "oracle")}
        sets = list(next(iter(result["arms"].values()))["data_sets"])
        places = np.arange(len(sets) + 1)
        width = 0.8 / max(len(arms), 1)
        for i, (name, arm) in enumerate(arms.items()):
            entries = [*(arm["data_sets"][d] for d in sets), arm["macro"]]
            tau = np.array([e["tau"]["value"] for e in entries])
            error = np.array(
                [[e["tau"]["value"] - e["tau"]["low"], e["tau"]["high"] - e["tau"]["value"]] for e in entries]
            )
            x = places + (i - (len(arms) - 1) / 2) * width
            axes.bar(x, tau, width, label=name, yerr=np.maximum(np.nan_to_num(error.T), 0), capsize=2)
            loop_free = [e["loop_free_tau"]["value"] for e in entries]
            axes.scatter(x, loop_free, marker="_", color="black", zorder=3)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xticks(places, [*sets, "macro"])
        axes.set_ylabel("accept length τ")
        axes.set_title(f"temperature {result['temperature']:g} (dash: loop-free)", loc="left")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save_picture(picture, path)


def _acceptance(results: Results, path: Path) -> None:
    picture, panels = _panels(1, len(results), 5, 3.6)
    for result, axes in zip(results, panels[0], strict=True):
        for name, arm in result["arms"].items():
            values = arm.get("conditional_acceptance", [])
            axes.plot(range(1, len(values) + 1), values, marker="o", label=name if values else None)
        axes.set_ylim(0, 1)
        axes.set_xlabel("position in the block")
        axes.set_ylabel("acceptance, given all before")
        axes.set_title(f"temperature {result['temperature']:g}", loc="left")
        axes.legend(frameon=False)
    save_picture(picture, path)


def _thresholds(results: Results, path: Path) -> None:
    picture, panels = _panels(len(results), 2, 5, 3.4)
    for result, (left, right) in zip(results, panels, strict=True):
        for name, arm in result["arms"].items():
            for data_set, sweep in arm.get("threshold_sweep", {}).items():
                style = {"label": f"{name}, {data_set}", "linewidth": 2.4 if data_set == "all" else 1.0}
                at = [row["threshold"] for row in sweep]
                left.plot(at, [row["acceptance_rate"] for row in sweep], **style)
                right.plot([row["window"] for row in sweep], [row["tokens_per_step"] for row in sweep], **style)
        left.set_xlabel("threshold on the conditional confidence")
        left.set_ylabel("share of sent drafts accepted")
        right.set_xlabel("mean window")
        right.set_ylabel("tokens a step")
        left.set_title(f"temperature {result['temperature']:g}", loc="left")
        left.legend(frameon=False, fontsize="x-small")
    save_picture(picture, path)


def draw_reliability(diagrams: Mapping[str, Sequence[tuple[str, Bins, Bins]]], path: Path) -> None:
    """Reliability diagrams: a row of panels for each class, each panel (title, before, after) a calibration."""
    columns = max(len(panels) for panels in diagrams.values())
    picture, grid = _panels(len(diagrams), columns, 2.4, 2.6)
    for (name, panels), row in zip(diagrams.items(), grid, strict=True):
        for (title, before, after), axes in zip(panels, row, strict=True):
            axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for label, bins in (("raw", before), ("calibrated", after)):
                filled = bins.count > 0
                size = 4 + 60 * bins.count[filled] / max(bins.count.sum(), 1)
                axes.plot(
                    bins.predicted[filled], bins.observed[filled], linewidth=1, label=f"{label} {_ece(bins)}"
                )
                axes.scatter(bins.predicted[filled], bins.observed[filled], s=size)
            axes.set_title(f"{name}, {title}", loc="left", fontsize="small")
            axes.legend(frameon=False, fontsize="x-small", title="ECE", title_fontsize="x-small")
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
        row[0].set_ylabel("survived")
    for axes in grid[-1]:
        axes.set_xlabel("predicted")
    save_picture(picture, path)


def _ece(bins: Bins) -> str:
    return f"{bins.ece:.1%}" if math.isfinite(bins.ece) else "–"
