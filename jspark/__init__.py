"""jspark: lossless speculative decoding in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jspark.errors import UserError

if TYPE_CHECKING:
    from jspark.llm import LLM
    from jspark.request import SamplingParams
    from jspark.structured import StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    """Classes on first use: `import jspark` itself does not import JAX."""
    if name == "LLM":
        from jspark.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jspark.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from jspark.structured import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'jspark' has no attribute {name!r}")
