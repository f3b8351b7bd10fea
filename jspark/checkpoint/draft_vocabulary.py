"""Drafters that predict only some of the target's tokens: their output rows put where the target's ids are.

Knows: the maps d2t (target id = draft id + d2t[draft id]) and t2d (true where a target id is kept), as
speculators and SpecForge write them. Does not know: dialects, or how the mask is applied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from jspark.checkpoint.settings import Settings
from jspark.checkpoint.source import TensorInfo, TensorSource
from jspark.errors import UserError

#: The tensor that `FullVocabulary` adds: [V], 0 for ids that can be drafted and −inf for the others.
MASK = "vocab_mask"
_MAP = re.compile(r"(?:model\.)?(d2t|t2d)")
#: Tensors with a row for each token that can be drafted.
_OUTPUTS = re.compile(r"(?:.+\.)?(?:lm_head|markov_w2)\.weight")


class FullVocabulary:
    """A `TensorSource` over `source` without its maps, with output rows of all V target ids and `MASK`.

    Rows of ids that cannot be drafted are zero: the mask takes them out, so nothing is changed by the detour.
    """

    def __init__(self, source: TensorSource, ids: np.ndarray, vocab_size: int):
        self._source = source
        self._ids = ids
        self._vocab_size = vocab_size
        self._infos = {name: info for name, info in source.infos.items() if not _MAP.fullmatch(name)}
        self._narrow = {
            name for name, i in self._infos.items() if _OUTPUTS.fullmatch(name) and i.shape[:1] == ids.shape
        }
        for name in self._narrow:
            info = self._infos[name]
            self._infos[name] = TensorInfo((vocab_size, *info.shape[1:]), info.dtype)
        self._infos[MASK] = TensorInfo((vocab_size,), "F32")

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the file, and the mask."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, narrow ones over the whole vocabulary."""
        if name == MASK:
            mask = np.full(self._vocab_size, -np.inf, np.float32)
            mask[self._ids] = 0
            return mask
        array = self._source.read(name)
        if name not in self._narrow:
            return array
        wide = np.zeros((self._vocab_size, *array.shape[1:]), array.dtype)
        wide[self._ids] = array
        return wide

    def readable(self, name: str) -> bool:
        """As in the file."""
        return name == MASK or self._source.readable(name)


def full_vocabulary(source: TensorSource, config: Settings, vocab_size: int) -> tuple[TensorSource, int]:
    """The tensors over the target's whole vocabulary, and how many ids can be drafted (0: all of them).

    config: the object that draft_vocab_size is in. Reads the maps and no other tensor. Raises UserError for
    maps that are missing, not one to one, or at odds with each other.
    """
    size = config.integer("draft_vocab_size", vocab_size, high=vocab_size)
    maps = {match[1]: name for name in source.infos if (match := _MAP.fullmatch(name))}
    if not maps and size == vocab_size:
        return source, 0
    if "d2t" not in maps:
        raise UserError(
            f"{config.origin}: the drafter has {size} of {vocab_size} tokens and no tensor d2t that says "
            "which; fetch the checkpoint again"
        )
    offsets = _map(source, maps["d2t"], "iu", size, config.origin)
    ids = np.arange(size) + offsets.astype(np.int64)
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not inside or len(np.unique(ids)) != size:
        raise UserError(
            f"{config.origin}: the tensor d2t does not map the drafter's {size} tokens to different ones of "
            f"{vocab_size}; fetch the checkpoint again"
        )
    if "t2d" in maps:
        kept = _map(source, maps["t2d"], "b", vocab_size, config.origin)
        if not np.array_equal(np.flatnonzero(kept), np.sort(ids)):
            raise UserError(
                f"{config.origin}: the tensors d2t and t2d name different tokens; fetch the checkpoint again"
            )
    return FullVocabulary(source, ids, vocab_size), size


def _map(source: TensorSource, name: str, kinds: str, size: int, origin: str) -> np.ndarray:
    shape = source.infos[name].shape
    array = source.read(name) if shape == (size,) else None
    if array is None or array.dtype.kind not in kinds:
        what = "true or false" if kinds == "b" else "whole numbers"
        raise UserError(
            f"{origin}: the tensor {name} of shape {list(shape)} must be {size} times {what}; "
            "fetch the checkpoint again"
        )
    return array
