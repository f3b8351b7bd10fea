"""What the server itself can be told: addresses, keys, limits, names.

Knows: flags and their defaults; the command line is made from them. Does not know: models and engines
(jspark/flags.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from jspark.errors import UserError

ToolFormat = Literal["auto", "hermes", "llama3_json", "mistral"]


@dataclass(frozen=True)
class ServerFlags:
    """Address, keys and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 interface."""
    port: int = 30000
    """Port to listen on; 0 takes a free one, which the start-up lines name."""
    api_key: Annotated[tuple[str, ...], arg(metavar="KEY")] = ()
    """Requests must carry one of these as "Authorization: Bearer KEY"; JSPARK_API_KEY adds one, unseen by ps."""
    tool_call_parser: ToolFormat = "auto"
    """How the model writes tool calls; auto goes by its chat template."""
    metrics_prefix: str = "jspark"
    """What the names under /metrics begin with; vllm suits its dashboards."""
    max_queued_requests: int = 1024
    """Answers that may wait for a slot; further requests get 429."""
    max_body_bytes: int = 4 << 20
    """Longest request body; longer ones get 413."""
    max_prompt_tokens: Annotated[int, arg(help_behavior_hint="(default: what the context holds)")] = 0
    """Longest prompt, in tokens."""
    request_timeout: float = 600.0
    """Seconds that a request may take from its arrival to its last byte; 0 is no limit."""
    drain_seconds: float = 30.0
    """Seconds that requests in progress get to end after SIGTERM or Ctrl-C."""
    access_log: Annotated[str, arg(metavar="FILE|-|none")] = "-"
    """One JSON line a request: to a file, to standard output, or nowhere."""
    log_requests: bool = False
    """Puts bodies, and so prompts, into the access log."""
    background_compile: bool = True
    """Answers as soon as the first programs are ready; a thread compiles the others, larger ones stand in."""
    warmup_only: bool = False
    """Measures the cost table, compiles the programs that a server needs into the cache, and ends."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port is {self.port}; it must be between 0 and 65535")
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise UserError(f"--metrics-prefix is {self.metrics_prefix!r}; it must be letters, digits and _")
        if not all(k and k.isascii() and k.isprintable() and " " not in k for k in self.api_key):
            raise UserError("an --api-key is empty or has spaces or other than ASCII characters; choose another")
        for name in ("max_queued_requests", "max_prompt_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 0 or more")
        if self.max_body_bytes < 1024:
            raise UserError(f"--max-body-bytes is {self.max_body_bytes}; it must be at least 1024")
        for name in ("request_timeout", "drain_seconds"):
            if not 0 <= getattr(self, name) < 1e9:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be 0 or more")

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are good."""
        own = os.environ.get("JSPARK_API_KEY")
        return (*self.api_key, own) if own else self.api_key
