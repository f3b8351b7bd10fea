"""Safetensors folders as a `TensorSource`: one file, or shards with an index.

Knows: which files hold the tensors, how they fail, and that pickles are never opened.
Does not know: tensor names' meaning or configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which safetensors needs
import numpy as np
from safetensors import SafetensorError, safe_open

from jspark.checkpoint.source import TensorInfo
from jspark.errors import UserError
from jspark.files import is_file, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
#: Bytes of an index; the largest known, of a trillion parameters in experts, has half of it.
_MAX_INDEX = 32 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name → file, as an index says; UserError for one that says nothing."""
    where = read_json(index, _MAX_INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(s, str) for s in where.values()):
        raise UserError(f"{index} has no weight_map from tensors to files; fetch the checkpoint again")
    return where


class SafetensorsFolder:
    """The tensors of a Hugging Face folder. Headers are read at once, data when asked for."""

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self._where: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        if (folder / SINGLE).is_file():
            for name in sorted(self._open(folder / SINGLE)):
                self._add(name, folder / SINGLE)
        elif (folder / INDEX).is_file():
            self._read_index(folder)
        else:
            raise UserError(_nothing_here(folder))

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name in the file."""
        return self._infos

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, copied out of the mapped file."""
        path = self._where[name]
        try:
            return self._files[str(path)].get_tensor(name)
        except (SafetensorError, OSError, TypeError) as e:
            raise UserError(f"tensor {name} of {path} cannot be read ({e}); fetch that file again") from None

    def readable(self, name: str) -> bool:
        """True for the float types numpy can hold."""
        return self._infos[name].dtype in _FLOATS

    def _read_index(self, folder: Path) -> None:
        index = folder / INDEX
        where = weight_map(index)
        names: dict[str, set[str]] = {}
        for shard in sorted(set(where.values())):
            if Path(shard).name != shard:
                raise UserError(f"{index} names a shard outside its folder ({shard}); correct the index")
            if not is_file(folder / shard):
                raise UserError(f"{index} names {shard}, which is not in the folder; fetch the missing shard")
            names[shard] = self._open(folder / shard)
        for name, shard in where.items():
            if name not in names[shard]:
                raise UserError(f"{index} says that {name} is in {shard}, which lacks it; fetch both again")
            self._add(name, folder / shard)

    def _open(self, path: Path) -> set[str]:
        try:
            file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as e:
            raise UserError(f"{path} is not a complete safetensors file ({e}); fetch that file again") from None
        self._files[str(path)] = file
        return set(file.keys())

    def _add(self, name: str, path: Path) -> None:
        part = self._files[str(path)].get_slice(name)
        self._where[name] = path
        self._infos[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype())


def _nothing_here(folder: Path) -> str:
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} holds its weights only as pickles ({pickles[0]}), which can run code when opened; "
            "convert them to model.safetensors"
        )
    return f"{folder} holds neither {SINGLE} nor {INDEX}; point to a folder with the model's weights"
