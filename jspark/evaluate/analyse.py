"""From runs to figures: one temperature, several data sets and arms.

Knows: which figures there are and how they are named in the record. Does not know: how runs are made, stored
(run.py) or shown (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from jspark.calibration import Temperatures
from jspark.evaluate import text_shape
from jspark.evaluate.accept_length import Counts, Figure, Macro, conditional_acceptance, threshold_sweep
from jspark.evaluate.collect import Run
from jspark.evaluate.confidence import by_position

PLAIN, LOOKUP, ORACLE = "plain", "prompt-lookup", "oracle"


@dataclass(frozen=True)
class Arm:
    """Something that is compared. block_size: γ, 0 for plain decoding."""

    name: str
    algorithm: str
    block_size: int
    temperatures: Temperatures | None = None


#: Runs by data set, then by arm.
Runs = Mapping[str, Mapping[str, Run]]


def analyse(
    temperature: float, arms: Sequence[Arm], runs: Runs, prompts: Mapping[str, int], lookup_size: int
) -> dict:
    """All figures of one temperature, as the record holds them.

    arms: plain decoding first. prompts: how many each data set has. lookup_size: γ of prompt lookup and oracle,
    which are worked out from plain decoding's texts.
    """
    result: dict = {"temperature": temperature, "arms": {}, "ratios": []}
    macros: dict[str, tuple[Macro, Macro]] = {}
    for arm in arms:
        steps = {name: (own[arm.name], _steps(own[arm.name])) for name, own in runs.items()}
        entry, macros[arm.name] = _lengths(steps, prompts)
        entry = {"algorithm": arm.algorithm, "block_size": arm.block_size, **entry}
        _speed(entry, arm, runs)
        if arm.block_size:
            _drafting(entry, arm, temperature, runs)
        result["arms"][arm.name] = entry
    if PLAIN in result["arms"]:
        for name in (LOOKUP, ORACLE):
            steps = {d: (own[PLAIN], _replayed(own[PLAIN], name, lookup_size)) for d, own in runs.items()}
            entry, macros[name] = _lengths(steps, prompts)
            result["arms"][name] = {"algorithm": name, "block_size": lookup_size, **entry}
    drafters = [a.name for a in arms if a.block_size]
    pairs = [(a, b) for i, a in enumerate(drafters) for b in drafters[i + 1 :]]
    pairs += [(a, LOOKUP) for a in drafters]
    result["ratios"] = [_compare(a, b, macros, runs) for a, b in pairs]
    return result


def _steps(run: Run):
    """(text, anchor position in the text, tokens committed) of every step."""
    return run.text, run.position, run.count


def _replayed(run: Run, name: str, block_size: int):
    """The steps that prompt lookup or the oracle would have taken through plain decoding's texts."""
    parts = []
    for i, (text, prompt) in enumerate(zip(run.texts(), run.prompt_length.tolist(), strict=True)):
        accepts = (
            text_shape.lookup_accepts(text, block_size)
            if name == LOOKUP
            else np.full(len(text), block_size, np.int64)
        )
        # The first new token is the prefill's, and the first anchor.
        position, count = text_shape.walk(accepts, prompt)
        parts.append((np.full(len(position), i, np.int64), position, count))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _lengths(steps: Mapping, prompts: Mapping[str, int]) -> tuple[dict, tuple[Macro, Macro]]:
    counts, loop_free, data_sets = {}, {}, {}
    for name, (run, (text, position, count)) in steps.items():
        looping = [text_shape.in_loop(t) for t in run.texts()]
        flat = np.concatenate(looping)
        inside = flat[run.start[text] + position]
        prompt = run.conversation[text]
        counts[name] = Counts.of(prompt, count, prompts[name])
        loop_free[name] = Counts.of(prompt, count, prompts[name], ~inside)
        data_sets[name] = {
            "prompts": prompts[name],
            "answers": len(run.conversation),
            "turns_left_out": int(run.left_out),
            "tokens": run.new_tokens,
            "steps": len(count),
            "loop_steps": float(np.mean(inside)) if len(inside) else 0.0,
        }
    both = Macro.of(counts), Macro.of(loop_free)
    for name, entry in data_sets.items():
        entry |= {"tau": asdict(both[0].figure(name)), "loop_free_tau": asdict(both[1].figure(name))}
    return {
        "data_sets": data_sets,
        "macro": {"tau": asdict(both[0].figure()), "loop_free_tau": asdict(both[1].figure())},
    }, both


def _speed(entry: dict, arm: Arm, runs: Runs) -> None:
    tokens = seconds = plain_tokens = plain_seconds = 0.0
    for name, own in runs.items():
        run, plain = own[arm.name], own.get(PLAIN)
        rate = run.new_tokens / float(run.seconds)
        entry["data_sets"][name]["tokens_per_second"] = rate
        tokens, seconds = tokens + run.new_tokens, seconds + float(run.seconds)
        if plain is not None:
            entry["data_sets"][name]["speed_up"] = rate * float(plain.seconds) / plain.new_tokens
            same = [plain.answers().get(k) == v for k, v in run.answers().items()]
            entry["data_sets"][name]["answers_equal_to_plain"] = int(np.sum(same))
            plain_tokens, plain_seconds = plain_tokens + plain.new_tokens, plain_seconds + float(plain.seconds)
    entry["tokens_per_second"] = tokens / seconds
    if plain_seconds:
        entry["speed_up"] = tokens / seconds / (plain_tokens / plain_seconds)


def _drafting(entry: dict, arm: Arm, temperature: float, runs: Runs) -> None:
    """Acceptance by position, and for a drafter with a confidence head what that is worth."""
    accepted = {name: own[arm.name].block_accepted for name, own in runs.items()}
    confidence = {name: own[arm.name].confidence for name, own in runs.items()}
    for name, values in accepted.items():
        entry["data_sets"][name]["conditional_acceptance"] = conditional_acceptance(values, arm.block_size)
    pooled = np.concatenate(list(accepted.values()))
    entry["conditional_acceptance"] = conditional_acceptance(pooled, arm.block_size)
    logits = np.concatenate(list(confidence.values()))
    if not len(logits) or not np.isfinite(logits).all():
        return
    scale = None
    if arm.temperatures is not None:
        scale = arm.temperatures.sampled if temperature else arm.temperatures.greedy
    fitted = None if scale is None else np.asarray(scale)
    entry["threshold_sweep"] = {"all": threshold_sweep(logits, pooled, scale)}
    for name in runs:
        entry["threshold_sweep"][name] = threshold_sweep(confidence[name], accepted[name], scale)
    each, together = by_position(logits, pooled, fitted)
    entry["confidence"] = {"temperatures": scale, "blocks": len(logits), "pooled": together, "by_position": each}


def _compare(a: str, b: str, macros: Mapping[str, tuple[Macro, Macro]], runs: Runs) -> dict:
    def all_of(kind: int, minus: float) -> dict[str, dict]:
        mine, other = macros[a][kind], macros[b][kind]
        figures: dict[str, Figure] = {name: mine.over(other, name, minus) for name in runs}
        return {"macro": asdict(mine.over(other, None, minus)), **{n: asdict(f) for n, f in figures.items()}}

    return {
        "of": a,
        "over": b,
        "tau": all_of(0, 0.0),
        "tau_minus_1": all_of(0, 1.0),
        "loop_free_tau": all_of(1, 0.0),
        "loop_free_tau_minus_1": all_of(1, 1.0),
    }
