"""The drafters there are, and which one a configuration means."""

from __future__ import annotations

from jspark.config import DrafterConfig
from jspark.models.decoder import Layout
from jspark.models.drafter import Drafter
from jspark.models.eagle3 import Eagle3

AnyDrafter = Drafter | Eagle3


def build_drafter(config: DrafterConfig, dtype, layout: Layout) -> AnyDrafter:
    """The modules of a drafter, with zeros for weights. EAGLE-3's few layers differ, so they lie apart."""
    return Drafter(config, dtype, layout) if config.eagle3 is None else Eagle3(config, dtype)
