"""GGUF files as a `TensorSource` with metadata.

Knows: the container (header, metadata, tensor table, alignment; versions 2 and 3, little-endian) and how to
dequantise through the `gguf` package. The header is walked here and not by that package's reader, which takes
seconds for a vocabulary and runs past the end of a damaged file.
Does not know: what keys and tensor names mean.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from jspark.checkpoint.source import TensorInfo
from jspark.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
#: Texts and numbers in all arrays together, and tensors: each takes more memory than it takes room in the file.
#: The largest vocabularies have about a third of it.
_MAX_ITEMS = 3 << 20
_MAX_TENSORS = 1 << 16
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}
_PLAIN = {
    GGMLQuantizationType.F64: np.dtype(np.float64),
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class _DamagedError(Exception):
    """What is wrong with the bytes, in words that follow "this file is damaged: "."""


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    kind: GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """Metadata and tensors of one file, mapped into memory; nothing but the header is read at first."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        except ValueError:  # numpy's word for a file of no bytes
            raise UserError(f"{path} is empty; fetch it again") from None
        except OSError as e:
            raise UserError(f"{path} cannot be read ({e.strerror}); check the path and its permissions") from None
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            self._read_header()
        except _DamagedError as e:
            raise UserError(f"{path} is not a complete GGUF file ({e}); fetch it again") from None

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its name; shapes outermost first, as numpy has them."""
        return {name: entry.info for name, entry in self._entries.items()}

    def readable(self, name: str) -> bool:
        """True for floats and for every quantisation that the `gguf` package dequantises."""
        kind = self._entries[name].kind
        return kind in _PLAIN or _dequantisable(kind)

    def read(self, name: str) -> np.ndarray:
        """Floats as stored (a view of the mapped file); quantised tensors as float32."""
        entry = self._entries[name]
        data = self._data[entry.start : entry.start + entry.size]
        shape = entry.info.shape
        if entry.kind in _PLAIN:
            return data.view(_PLAIN[entry.kind]).reshape(shape)
        block, size = GGML_QUANT_SIZES[entry.kind]
        rows = data.reshape(*shape[:-1], shape[-1] // block * size)
        return dequantize(rows, entry.kind).reshape(shape)

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        if bytes(cursor.take(4)) != _MAGIC:
            raise _DamagedError("it does not begin with GGUF")
        version = cursor.number("<I")
        if version & 0xFFFF == 0:
            raise UserError(f"{self.path} is big-endian, which is not supported; use a little-endian GGUF")
        if version not in _VERSIONS:
            raise UserError(f"{self.path} has GGUF version {version}; convert it to version 3")
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        for _ in range(pairs):
            key = cursor.text()
            if key in self.metadata:
                raise _DamagedError(f"the key {key} appears twice")
            self.metadata[key] = cursor.value()
        if tensors > _MAX_TENSORS:
            raise _DamagedError(f"it claims to hold {tensors} tensors")
        table = [self._read_entry(cursor) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise _DamagedError(f"an alignment of {align}")
        start = -(-cursor.offset // align) * align
        for name, entry in table:
            if name in self._entries:
                raise _DamagedError(f"the tensor {name} appears twice")
            if start + entry.start + entry.size > len(self._data):
                raise _DamagedError(f"the data of {name} ends beyond the end of the file")
            self._entries[name] = _Entry(entry.info, entry.kind, start + entry.start, entry.size)
        in_order = sorted((e for e in self._entries.values() if e.size), key=lambda e: e.start)
        if any(a.start + a.size > b.start for a, b in itertools.pairwise(in_order)):
            raise _DamagedError("tensors overlap in it")

    def _read_entry(self, cursor: _Cursor) -> tuple[str, _Entry]:
        name = cursor.text()
        rank = cursor.number("<I")
        if rank > _MAX_DIMS:
            raise _DamagedError(f"the tensor {name} has {rank} dimensions")
        shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
        code, offset = cursor.number("<I"), cursor.number("<Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise UserError(
                f"{self.path}: {name} is of tensor type {code}, which is unknown; use a file in F16 or Q8_0"
            ) from None
        block, size = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise _DamagedError(f"rows of {shape[-1]} in {name} are not whole blocks of {kind.name}")
        count = 1
        for dim in shape:
            count *= dim
        return name, _Entry(TensorInfo(shape, kind.name), kind, offset, count // block * size)


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, data: np.ndarray):
        self._view = memoryview(data)
        self.offset = 0
        self._items = 0

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self._view):
            raise _DamagedError("it ends within its header")
        part = self._view[self.offset : end]
        self.offset = end
        return part

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        self._count(1)
        try:
            return str(self.take(self.number("<Q")), "utf-8")
        except UnicodeDecodeError:
            raise _DamagedError("a text in its header is not UTF-8") from None

    def _count(self, items: int) -> None:
        self._items += items
        if self._items > _MAX_ITEMS:
            raise _DamagedError("its header has more entries than any model's")

    def value(self) -> Any:
        kind = self._kind()
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self._kind(), self.number("<Q")
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        if kind == GGUFValueType.ARRAY:
            raise _DamagedError("an array of arrays in its metadata")
        return self._scalars(kind, count)

    def _kind(self) -> GGUFValueType:
        code = self.number("<I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise _DamagedError(f"metadata of unknown type {code}") from None

    def _scalars(self, kind: GGUFValueType, count: int) -> list[Any]:
        self._count(count)
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


@cache
def _dequantisable(kind: GGMLQuantizationType) -> bool:
    """Asks the package by giving it one block of zeros."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, ValueError):
        return False
    return True
