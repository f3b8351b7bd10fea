"""Server processes for benchmarks: started, waited for, asked for a first token, ended.

Knows: how `jspark serve` is run and what it says at the start; which caches make a start warm. Does not know: the
loads (load.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from jspark.checkpoint.cache import cache_dir
from jspark.errors import UserError

#: What a cold start finds empty: folders of the cache that the engine fills by itself.
_OWN = ("xla", "cost")


@dataclass(frozen=True)
class Server:
    """A server that is ready. address: without /v1. process: its id. Seconds run from the start of the process.

    said: its start-up lines.
    """

    address: str
    process: int
    listening_seconds: float
    ready_seconds: float
    said: tuple[str, ...]
    began: float

    def first_token(self) -> float:
        """Seconds from the start to the first token of a streamed answer, which is asked for now."""
        body = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True
        with httpx.stream("POST", f"{self.address}/v1/completions", json=body, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    return time.perf_counter() - self.began
        raise UserError("the server ended a stream before its first token")


@contextmanager
def started(flags: str, cache: Path | None = None) -> Iterator[Server]:
    """A server with these flags, once it is ready; ended at the end. cache: in place of jspark's own."""
    words = [sys.executable, "-m", "jspark", "serve", *shlex.split(flags), "--port", "0", "--access-log", "none"]
    # This process keeps its hands off the device's memory; the server may have it all.
    env = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    if cache is not None:
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        env["JSPARK_CACHE"] = str(cache)
    began = time.perf_counter()
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    reader = None
    try:
        lines, address, listening = [], "", 0.0
        for line in process.stderr:
            lines.append(line.strip())
            if found := re.search(r"listening on (http://\S+?);", line):
                address, listening = found[1], time.perf_counter() - began
            if line.startswith("ready"):
                break
        else:
            raise UserError(f"the server did not start: {lines[-1] if lines else 'it said nothing'}")
        ready = time.perf_counter() - began
        # Its later lines are few, and must not fill the pipe.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield Server(address, process.pid, listening, ready, tuple(lines), began)
    finally:
        process.terminate()
        process.wait(60)
        if reader is not None:
            reader.join(10)
        process.stderr.close()


@contextmanager
def cold_cache() -> Iterator[Path]:
    """A cache like jspark's own, with its models, in which nothing is compiled or measured yet."""
    with tempfile.TemporaryDirectory() as folder:
        for entry in cache_dir().glob("*"):
            if entry.name not in _OWN:
                (Path(folder) / entry.name).symlink_to(entry)
        yield Path(folder)


def starts(flags: str) -> dict[str, Any]:
    """A start in a cold cache and one in what the first left there, each until its first token."""
    found = {}
    with cold_cache() as cache:
        for name in ("cold", "warm"):
            with started(flags, cache) as server:
                found[name] = {
                    "listening_seconds": server.listening_seconds,
                    "ready_seconds": server.ready_seconds,
                    "first_token_seconds": server.first_token(),
                    "said": server.said,
                }
    return found
