"""A calibration: ask, record every fully verified block, fit temperatures, check them on other prompts.

Knows: the split, the classes, the record. Does not know: flags (cli_calibrate.py), or how the fit works (sts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspark import sts
from jspark.calibration import CLASSES
from jspark.errors import UserError
from jspark.evaluate.collect import Recorder, answer
from jspark.evaluate.confidence import Bins, bins, by_position, survival
from jspark.evaluate.data import DataSet
from jspark.llm import LLM
from jspark.request import SamplingParams
from jspark.sts import survived

#: Blocks below which chance alone shows in the third digit of an ECE.
ENOUGH_BLOCKS = 50_000

Blocks = tuple[np.ndarray, np.ndarray]


def collect(
    llm: LLM,
    recorder: Recorder,
    data: Sequence[DataSet],
    params: SamplingParams,
    seed: int,
    tell: Callable[[str, int], None],
) -> tuple[Blocks, Blocks]:
    """(raw confidence [n, γ], accepted drafts [n]) of every block, for the fit and for the check.

    Every second prompt of a data set is for the check: blocks of one answer resemble each other, so a split of
    blocks would not be one. Raises UserError where there are no blocks for one of them.
    """
    halves: tuple[list[Blocks], list[Blocks]] = ([], [])
    for d in data:
        run = answer(llm, recorder, d, params, seed, lambda n, d=d: tell(d.name, n))
        odd = run.conversation[run.text] % 2
        for half, parts in enumerate(halves):
            parts.append((run.confidence[odd == half], run.block_accepted[odd == half]))
    fit, check = (
        (np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])) for parts in halves
    )
    if not len(fit[0]) or not len(check[0]):
        raise UserError(
            "there are too few answers to fit on some and check on others; give more or longer prompts"
        )
    return fit, check


def calibrate(blocks: Mapping[str, tuple[Blocks, Blocks]]) -> dict[str, Any]:
    """Temperatures of each class and of both together, with scores on data that no fit has seen.

    blocks: (fit, check) of the classes. The record has the fields of SGLang's files (temperatures, num_samples,
    ece_before, ece_after by position) for both classes together, and the classes beside them.
    """
    record: dict[str, Any] = {}
    fit, check = (_joined([blocks[c][i] for c in CLASSES]) for i in (0, 1))
    both = _class(fit, check)
    record["temperatures"] = both["temperatures"]
    record["num_samples"] = len(fit[0])
    for when in ("before", "after"):
        record[f"ece_{when}"] = [row["ece"] for row in both[when]["by_position"]]
    record["pooled"] = {when: both[when]["pooled"] for when in ("before", "after")}
    record["classes"] = {name: _class(*blocks[name]) for name in CLASSES}
    return record


def _class(fit: Blocks, check: Blocks) -> dict[str, Any]:
    temperatures = sts.fit(*fit)
    scores = {}
    for when, scale in (("before", None), ("after", np.asarray(temperatures))):
        each, pooled = by_position(*check, scale)
        scores[when] = {"pooled": pooled, "by_position": each}
    return {"temperatures": list(temperatures), "fit_blocks": len(fit[0]), "check_blocks": len(check[0]), **scores}


def _joined(parts: Sequence[Blocks]) -> Blocks:
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def reliability(check: Blocks, temperatures: Sequence[float]) -> list[tuple[str, Bins, Bins]]:
    """(title, raw, calibrated) diagrams of prefix survival: of all positions together, then of each."""
    logits, accepted = check
    outcome = survived(accepted, logits.shape[1])
    both = survival(logits), survival(logits, np.asarray(temperatures))
    raw, calibrated = (bins(s.reshape(-1), outcome.reshape(-1)) for s in both)
    panels = [("all", raw, calibrated)]
    for k in range(logits.shape[1]):
        raw, calibrated = (bins(s[:, k], outcome[:, k]) for s in both)
        panels.append((f"k = {k + 1}", raw, calibrated))
    return panels
