"""Files of a confidence calibration: sequential temperature scaling (STS), one temperature a drafted token.

Knows: the file's form. Does not know: drafters, or how temperatures are fitted (sts.py) and used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jspark.errors import UserError
from jspark.files import MAX_JSON, UnreadableError, read_text

#: Classes of requests with temperatures of their own: how sure a drafter may be depends on who judges its drafts.
CLASSES = ("greedy", "sampled")


@dataclass(frozen=True)
class Temperatures:
    """Temperatures T₁ … T_γ of the confidence logits of greedy and of sampled requests."""

    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    @classmethod
    def of(cls, values: Temperatures | Sequence[float]) -> Temperatures:
        """Itself, or the same numbers for both classes."""
        return values if isinstance(values, Temperatures) else cls(tuple(values), tuple(values))

    def table(self, block_size: int) -> np.ndarray:
        """float32 [2, γ], greedy first; UserError where they were fitted for another γ or are not positive."""
        for values in (self.greedy, self.sampled):
            if not all(0 < t < math.inf for t in values):
                raise UserError("the calibration's temperatures must be positive numbers; calibrate again")
            if len(values) != block_size:
                raise UserError(
                    f"the calibration has {len(values)} temperatures and the block has {block_size} tokens; "
                    "calibrate again at this block size"
                )
        return np.array([self.greedy, self.sampled], np.float32)


def read_temperatures(path: str | Path) -> Temperatures:
    """The temperatures in a JSON file {"temperatures": [t₁, …, t_γ]}; UserError for anything else.

    A class in "classes" ({"greedy": {"temperatures": …}, "sampled": …}) has its own. SGLang's files are of this
    form, and it reads ours: it takes the first list, which is fitted to both classes together.
    """
    try:
        content = json.loads(read_text(Path(path), MAX_JSON))
        classes = content.get("classes", {})
        pooled = _numbers(content)
        own = [_numbers(classes[name]) if name in classes else pooled for name in CLASSES]
    except UnreadableError as e:
        raise UserError(f"the calibration {path} cannot be read ({e}); pass a file that exists") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(
            f'{path} is no calibration; it must be JSON of the form {{"temperatures": [positive numbers]}}'
        ) from None
    return Temperatures(*own)


def _numbers(content: dict[str, Any]) -> tuple[float, ...]:
    values = content["temperatures"]
    numbers = tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    if not numbers or len(numbers) != len(values) or not all(0 < n < math.inf for n in numbers):
        raise ValueError
    return numbers
