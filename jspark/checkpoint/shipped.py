"""The drafters that come with the package, for built-in targets.

Knows: where they lie. Does not know: how they are read or were made (docs/training.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class ShippedDrafter:
    """A drafter's folder, and the calibration of its confidence; None where it has none."""

    folder: Path
    calibration: Path | None


def shipped_drafter(target: str, algorithm: str) -> ShippedDrafter | None:
    """The drafter of this kind for the built-in target of this name; None where none comes with the package."""
    folder = _FOLDER / f"{target}-{algorithm.lower()}"
    # A path is no name of a built-in.
    if Path(target).name != target or not (folder / "config.json").is_file():
        return None
    calibration = _FOLDER / f"{folder.name}.json"
    return ShippedDrafter(folder, calibration if calibration.is_file() else None)
