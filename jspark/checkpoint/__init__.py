"""Files → configuration, tensors, tokenizer. Numpy only: placing arrays on devices is the caller's.

`open_target`, `open_drafter` and `describe` are all that the rest of the program calls.
"""

from jspark.checkpoint.checkpoint import DrafterCheckpoint, TargetCheckpoint, open_drafter, open_target
from jspark.checkpoint.describe import describe

__all__ = ["DrafterCheckpoint", "TargetCheckpoint", "describe", "open_drafter", "open_target"]
