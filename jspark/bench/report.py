"""What every benchmark leaves behind: a JSON file, a picture beside it, and a table on the screen.

Knows: the facts that belong to a figure (command, versions, date, device). Does not know: what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import jspark
from jspark.errors import UserError

Record = dict[str, Any]


def describe(name: str, command: str, mesh: Mesh) -> Record:
    """The head of a record about the first device of `mesh`.

    load_average: of the last minute, before anything was measured (cores in use).
    """
    device = mesh.devices.flat[0]
    return {
        "benchmark": name,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "jspark": jspark.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "jaxlib", "flax", "numpy")},
        },
        "device": {
            "platform": device.platform,
            "kind": _cpu_name() if device.platform == "cpu" else device.device_kind,
            "cores": cores(),
            "load_average": os.getloadavg()[0],
        },
    }


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes(process: int | str | None) -> int | None:
    """Resident bytes of a process, by its number or "self"; None where it cannot be seen."""
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def command_line(words: str, flags: Any) -> str:
    """The command that gives the dataclass `flags`: `words` and every flag that is not at its default."""

    def given(field: Field) -> bool:
        return getattr(flags, field.name) != field.default

    parts = words.split()
    for field in filter(given, fields(flags)):
        value = getattr(flags, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            parts += ["--" + field.name.replace("_", "-"), *([] if one is True else [str(one)])]
    return shlex.join(parts)


def check_output(path: Path) -> None:
    """Raises UserError when the record could not be written to `path`, before minutes of measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError:
        writable = False
    if path.suffix != ".json" or not writable:
        raise UserError(f"{path} cannot be written as a JSON file; choose a name that ends in .json elsewhere")


def save(record: Record, path: Path, draw: Callable[[Axes], None]) -> None:
    """Writes `record` to `path`, and what `draw` draws to the PNG of the same name."""

    def draw_one(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)

    save_json(record, path)
    save_figure(path, draw_one)


def save_json(record: Record, path: Path) -> None:
    """Writes `record` to `path`; what was there stays whole until the new file is."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def save_figure(path: Path, draw: Callable[[Figure], None], size: tuple[float, float] = (8, 4.5)) -> None:
    """What `draw` draws, `size` in inches, as the PNG beside the record at `path`."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path.with_suffix(".png"), dpi=150)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    """Prints a table, and under it one line a note."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
