"""Training text on disk: conversations as token ids with the spans to train on, in array_record files.

Knows: the record layout, how parts appear whole or not at all, and how a half-written folder goes on.
Does not know: where conversations come from (writer.py, conversations.py), or how they are packed (pipeline.py).

A folder holds `text.json` (what the text was made with), parts `part-00000.array_record`, … and, once complete,
`report.json`. A part is written under another name, synced and renamed; what a killed run left behind is removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from jspark.errors import UserError

_META, _REPORT, _PARTIAL = "text.json", "report.json", ".partial"
_MAGIC = np.uint32(0x4A535031)


@dataclass(frozen=True)
class Conversation:
    """Token ids [n] and the spans [s, 2] (start, end) of the target's own answers. id: unique within a folder."""

    id: int
    tokens: np.ndarray
    spans: np.ndarray

    def mask(self) -> np.ndarray:
        """True for the tokens of the answers, [n]."""
        mask = np.zeros(len(self.tokens), bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask

    def pack(self) -> bytes:
        """As stored: header and spans as uint32, ids as uint16 where they all fit, else uint32."""
        narrow = int(self.tokens.max(initial=0)) < 1 << 16
        head = np.array([_MAGIC, self.id, len(self.tokens), len(self.spans), 2 if narrow else 4], np.uint32)
        ids = self.tokens.astype(np.uint16 if narrow else np.uint32)
        return head.tobytes() + self.spans.astype(np.uint32).tobytes() + ids.tobytes()

    @classmethod
    def unpack(cls, record: bytes) -> Conversation:
        """The inverse of `pack`; ValueError for bytes that are no record."""
        head = np.frombuffer(record, np.uint32, 5)
        if head[0] != _MAGIC:
            raise ValueError("not a conversation")
        _, index, count, spans, width = (int(x) for x in head)
        where = np.frombuffer(record, np.uint32, 2 * spans, 20).reshape(spans, 2)
        ids = np.frombuffer(record, np.uint16 if width == 2 else np.uint32, count, 20 + 8 * spans)
        return cls(index, ids.astype(np.int32), where.astype(np.int32))


@dataclass
class TextFolder:
    """A folder that conversations are added to, or that is gone on with.

    meta: what the text is made with; a folder made with anything else is refused. part_size: conversations a
    part; what is not yet in a part is lost when the process is killed, and made again.
    """

    path: Path
    meta: Mapping[str, Any]
    part_size: int = 4096
    _pending: list[Conversation] = field(default_factory=list)
    _parts: int = 0

    def open(self) -> list[Conversation]:
        """Makes the folder, or returns what it holds already; UserError when it was made differently."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob("*" + _PARTIAL):
                left.unlink()
            known = self.path / _META
            if known.exists():
                _check_same(json.loads(known.read_text()), self.meta, self.path)
            elif any(self.path.iterdir()):
                raise UserError(f"{self.path} is not empty and holds no training text; name another folder")
            else:
                _write_json(known, self.meta)
            held = list(_parts(self.path))
            self._parts = len(held)
            return [c for part in held for c in _read_part(part)]
        except (OSError, ValueError) as e:
            raise UserError(f"the text folder {self.path} cannot be used ({e}); name another folder") from None

    def add(self, conversation: Conversation) -> None:
        """Keeps a conversation; written with the part it belongs to."""
        self._pending.append(conversation)
        if len(self._pending) >= self.part_size:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending as one part; UserError when the disk is full, and the part is not there then."""
        if not self._pending:
            return
        final = self.path / f"part-{self._parts:05d}.array_record"
        partial = final.with_name(final.name + _PARTIAL)
        try:
            writer = ArrayRecordWriter(str(partial), "group_size:1")
            for conversation in self._pending:
                writer.write(conversation.pack())
            writer.close()
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            if sum(1 for _ in _read_part(partial)) != len(self._pending):
                raise OSError("the part could not be read back")
            partial.replace(final)
        except (OSError, RuntimeError, ValueError) as e:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{final} cannot be written ({e}); free some space and run the same command again, it goes on "
                "where it was"
            ) from None
        self._parts += 1
        self._pending.clear()

    def close(self, report: Mapping[str, Any]) -> None:
        """Writes the rest and the report."""
        self.flush()
        _write_json(self.path / _REPORT, report)


class Text(Sequence):
    """Random access to the conversations of one or more finished or unfinished folders, part by part."""

    def __init__(self, folders: Sequence[Path]):
        self.meta: list[dict[str, Any]] = []
        self._readers: list[ArrayRecordReader] = []
        for folder in folders:
            known = folder / _META
            if not known.is_file():
                raise UserError(f"{folder} holds no training text; make it with jspark data")
            self.meta.append(json.loads(known.read_text()))
            self._readers += [ArrayRecordReader(str(p)) for p in _parts(folder)]
        counts = [r.num_records() for r in self._readers]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        if not len(self):
            raise UserError(f"{folders[0]} holds no conversation yet; run jspark data to its end")

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        return Conversation.unpack(self._readers[part].read([index - int(self._first[part])])[0])

    def __iter__(self) -> Iterator[Conversation]:
        for reader in self._readers:
            yield from map(Conversation.unpack, reader.read_all())

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers:
            reader.close()


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.array_record"))


def _read_part(path: Path) -> Iterator[Conversation]:
    reader = ArrayRecordReader(str(path))
    try:
        yield from map(Conversation.unpack, reader.read_all())
    finally:
        reader.close()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _check_same(held: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    wanted = json.loads(json.dumps(wanted))
    changed = [k for k in sorted({*held, *wanted}) if held.get(k) != wanted.get(k)]
    if changed:
        key = changed[0]
        raise UserError(
            f"{path} was made with {key} {held.get(key)!r}, not {wanted.get(key)!r}; give the same settings to go "
            "on with it, or name another folder"
        )
