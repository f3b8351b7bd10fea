"""`jspark convert`: a drafter of any dialect, written down in the one that most programs read.

Knows: flags and what is said at the end. Does not know: how a drafter is written (checkpoint/export.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from jspark.flags import AnchorPredicts, yes_or_no


@dataclass(frozen=True)
class Convert:
    """Write a drafter as DeepSpec does (config.json and model.safetensors), or as z-lab does for DFlash."""

    source: Annotated[Positional[str], arg(metavar="DRAFT")]
    """The drafter's folder or Hub id (org/name or org/name@REV), in any dialect."""
    target: Annotated[Positional[str], arg(metavar="FOLDER")]
    """The folder to make."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        arg(metavar="{float32,bfloat16,int8}", help_behavior_hint="(default: as stored)"),
    ] = None
    """Of the weights; int8 has a scale for every output row, and only jspark reads it."""
    overwrite: bool = False
    """Replaces a drafter that is in the folder already."""
    draft_anchor_predicts: AnchorPredicts = None
    """Whether row 0 of the drafter predicts, for drafters that do not say so themselves."""

    def run(self) -> int:
        """Converts."""
        from jspark.checkpoint import open_drafter
        from jspark.checkpoint.export import export_drafter

        checkpoint = open_drafter(self.source, yes_or_no(self.draft_anchor_predicts))
        folder = Path(self.target).expanduser()
        written = export_drafter(checkpoint, folder, dtype=self.dtype, overwrite=self.overwrite)
        print(f"{folder}: {checkpoint.name}, from the dialect {checkpoint.config.dialect} to {written.dialect}")
        return 0
