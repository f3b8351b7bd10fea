"""Files of a confidence calibration: sequential temperature scaling (STS), one temperature a drafted token.

Knows: the file's form. Does not know: drafters, or how temperatures are fitted and used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from jspark.errors import UserError
from jspark.files import MAX_JSON, UnreadableError, read_text


def read_temperatures(path: str | Path) -> tuple[float, ...]:
    """The temperatures in a JSON file {"temperatures": [t₁, …, t_γ]}; UserError for anything else."""
    try:
        values = json.loads(read_text(Path(path), MAX_JSON))["temperatures"]
        numbers = tuple(float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    except UnreadableError as e:
        raise UserError(f"the calibration {path} cannot be read ({e}); pass a file that exists") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        values, numbers = [], ()
    if not numbers or len(numbers) != len(values) or not all(0 < n < math.inf for n in numbers):
        raise UserError(
            f'{path} is no calibration; it must be JSON of the form {{"temperatures": [positive numbers]}}'
        )
    return numbers
