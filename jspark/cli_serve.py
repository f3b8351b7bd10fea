"""`jspark serve`: an OpenAI-compatible server.

Knows: flags. Does not know: how requests are answered (serve/).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jspark.cli_profile import Warmup
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
        if self.server.warmup_only:
            return Warmup(self.model, self.speculation, self.engine).run()
        from serve.server import serve

        more = {"measure_cost": True, "background_compile": self.server.background_compile}
        flags = self.model, self.speculation, self.engine
        return serve(lambda observer, tell: open_llm(*flags, observer, tell=tell, **more), self.server)
