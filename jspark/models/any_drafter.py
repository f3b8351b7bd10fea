"""The drafters there are, and which one a configuration means."""

from __future__ import annotations

from jspark.config import DrafterConfig
from jspark.models.drafter import Drafter
from jspark.models.eagle3 import Eagle3

AnyDrafter = Drafter | Eagle3


def build_drafter(config: DrafterConfig, dtype, *, stacked: bool) -> AnyDrafter:
    """The modules of a drafter, with zeros for weights. EAGLE-3's few layers differ, so they are never stacked."""
    return Drafter(config, dtype, stacked=stacked) if config.eagle3 is None else Eagle3(config, dtype)
