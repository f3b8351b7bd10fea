"""Files → configuration, tensors, tokenizer. Numpy only: placing arrays on devices is the caller's.

`open_target`, `open_drafter` and `describe` are all that the rest of the program calls, beside
`export.export_drafter`, the way back, which alone knows modules and so JAX.
"""

from jspark.checkpoint.checkpoint import DrafterCheckpoint, TargetCheckpoint, open_drafter, open_target
from jspark.checkpoint.describe import describe

__all__ = ["DrafterCheckpoint", "TargetCheckpoint", "describe", "open_drafter", "open_target"]
