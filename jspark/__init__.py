"""jspark: lossless speculative decoding in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jspark.errors import UserError

if TYPE_CHECKING:
    from jspark.llm import LLM
    from jspark.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams on first use: `import jspark` itself does not import JAX."""
    if name == "LLM":
        from jspark.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jspark.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'jspark' has no attribute {name!r}")
