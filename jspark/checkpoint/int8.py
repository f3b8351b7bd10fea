"""Drafters stored in eight bits: a scale for each output row, dequantised when they are read.

Knows: the two tensors that stand for one (`x.weight` in int8, `x.weight_scale` in float32, one a row of the
file's orientation [out, in]), and how config.json marks such a folder. Does not know: dialects or models.
Arithmetic is in the engine's own dtype, so this saves space in files and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspark.checkpoint.settings import Settings
from jspark.checkpoint.source import TensorInfo, TensorSource
from jspark.errors import UserError

METHOD = "jspark-int8"
_SCALE = "_scale"
#: Narrower matrices are left as they are: the scales would cost more than they save.
_NARROWEST = 16


def quantised(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with every wide matrix as int8 and its row scales; x ≈ q · scale, |q| ≤ 127."""
    out = {}
    for name, array in tensors.items():
        if array.ndim != 2 or min(array.shape) < _NARROWEST:
            out[name] = array
            continue
        x = array.astype(np.float32)
        scale = np.maximum(np.abs(x).max(axis=1), np.finfo(np.float32).tiny) / 127
        out[name] = np.rint(x / scale[:, None]).astype(np.int8)
        out[name + _SCALE] = scale
    return out


def marker() -> dict[str, Any]:
    """What config.json says of it."""
    return {"quantization_config": {"quant_method": METHOD}}


def dequantised(source: TensorSource, config: Settings) -> tuple[TensorSource, Settings]:
    """`source` with float tensors only and `config` without the mark; both as they are where there is none."""
    section = config.get("quantization_config")
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        return source, config
    values = {key: value for key, value in config.values.items() if key != "quantization_config"}
    return _Dequantised(source, config.origin), Settings(values, config.origin)


class _Dequantised:
    def __init__(self, source: TensorSource, origin: str):
        self._source = source
        infos = source.infos
        self._quantised = {n for n in infos if n + _SCALE in infos}
        bare = [n for n, i in infos.items() if i.dtype == "I8" and n not in self._quantised]
        if bare:
            raise UserError(f"{origin}: {bare[0]} is stored in int8 without its scales; fetch the drafter again")
        for name in self._quantised:
            want = infos[name].shape[:1]
            if infos[name].dtype != "I8" or infos[name + _SCALE].shape != want:
                raise UserError(f"{origin}: {name} and its scales do not belong together; fetch the drafter again")
        self._infos = {
            n: TensorInfo(i.shape, "F32") if n in self._quantised else i
            for n, i in infos.items()
            if not (n.endswith(_SCALE) and n.removesuffix(_SCALE) in self._quantised)
        }

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name, without the scales."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """The tensor as floats."""
        array = self._source.read(name)
        if name not in self._quantised:
            return array
        return array.astype(np.float32) * self._source.read(name + _SCALE)[:, None]

    def readable(self, name: str) -> bool:
        """As in the file, and everything that is dequantised."""
        return name in self._quantised or self._source.readable(name)
