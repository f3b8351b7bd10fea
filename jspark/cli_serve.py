"""`jspark serve`: an OpenAI-compatible server.

Knows: flags. Does not know: how requests are answered (serve/).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jspark.flags import EngineFlags, ModelFlags, SpeculationFlags, open_llm
from serve.settings import ServerFlags


@dataclass(frozen=True)
class Serve:
    """Answer OpenAI clients over HTTP; start-up lines go to stderr, the access log to stdout."""

    model: ModelFlags
    server: ServerFlags = field(default_factory=ServerFlags)
    speculation: SpeculationFlags = field(default_factory=SpeculationFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        """Serves until a signal."""
        from serve.server import serve

        return serve(lambda observer: open_llm(self.model, self.speculation, self.engine, observer), self.server)
