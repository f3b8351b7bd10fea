"""`jspark info`: what a checkpoint is.

Knows: how facts are shown. Does not know: where they come from (checkpoint/describe.py).
"""

from __future__ import annotations

import json as json_format
from dataclasses import dataclass
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from jspark.flags import AnchorPredicts, Revision, yes_or_no


@dataclass(frozen=True)
class Info:
    """Say what a target or a drafter is, from its files' headers."""

    checkpoint: Annotated[Positional[str], arg(metavar="MODEL_OR_DRAFT")]
    """A folder, a GGUF file, a built-in model's name or a Hub id: org/name, org/name@REV, org/name:FILE."""
    revision: Revision = None
    """Branch, tag or commit of a model of the Hub."""
    offline: bool = False
    """Fetches nothing: the files come from the disk."""
    json: bool = False
    """One JSON object instead of a table."""

    draft_anchor_predicts: AnchorPredicts = None
    """Whether row 0 of a drafter predicts, for drafters that do not say so themselves."""

    def run(self) -> int:
        """Prints the facts."""
        from jspark.checkpoint import describe

        facts = describe(self.checkpoint, yes_or_no(self.draft_anchor_predicts), self.revision, self.offline)
        if self.json:
            print(json_format.dumps(facts))
            return 0
        table = Table("", "", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(Text(name.replace("_", " "), "bold"), Text(_plain(value)))
        Console(highlight=False).print(table)
        return 0


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
