"""Opening a checkpoint: what the user names → configuration, tensors, tokenizer.

Knows: how to tell a folder, a GGUF file, a built-in name, a target and a drafter apart.
Does not know: the formats themselves, devices, or which parameters a model has (callers pass them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from jspark.checkpoint import builtin, gguf_config, gguf_vocabulary, hf_config, hub
from jspark.checkpoint.draft_vocabulary import full_vocabulary
from jspark.checkpoint.drafters import (
    find_dialect,
    looks_like_drafter,
    read_drafter,
    unknown_dialect,
    with_tensors,
)
from jspark.checkpoint.gguf_file import GGUFFile
from jspark.checkpoint.int8 import dequantised
from jspark.checkpoint.safetensors_files import SafetensorsFolder
from jspark.checkpoint.settings import MAX_LAYERS, Settings
from jspark.checkpoint.source import (
    DECODER_RULES,
    TRANSPOSE,
    Located,
    NoTensors,
    Rule,
    Shape,
    TensorSource,
    check,
    locate,
    stream,
)
from jspark.checkpoint.verifier import Verifier, read_verifier
from jspark.config import DecoderConfig, DrafterConfig
from jspark.errors import UserError
from jspark.files import read_json
from jspark.tokenizer import Tokenizer, from_folder


@dataclass(frozen=True)
class Tensors:
    """The tensors of one checkpoint under our parameter paths."""

    source: TensorSource = field(repr=False)
    found: Mapping[str, Located] = field(repr=False)
    unknown: tuple[str, ...] = field(repr=False)
    label: str

    def parameters(self, expected: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
        """(path, array in our orientation) for every path of `expected`, in its order, one tensor at a time.

        Names, shapes and types are checked from headers by this call, before anything is read: one UserError
        lists all that is missing, mis-shaped or left over. Arrays have the file's own float type (float32 for
        quantised tensors) and may be read-only views of the mapped file.
        """
        return stream(self.source, check(self.source, self.found, self.unknown, expected, self.label))


def _tensors(source: TensorSource, rules: tuple[Rule, ...], label: str) -> Tensors:
    found, unknown = locate(source, rules)
    return Tensors(source, found, tuple(unknown), label)


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target model on disk. `format` is "safetensors" or "gguf"."""

    config: DecoderConfig
    name: str
    path: Path
    format: str
    tensors: Tensors
    load_tokenizer: Callable[[], Tokenizer | str] = field(repr=False)

    def parameters(self, expected: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
        """See `Tensors.parameters`."""
        return self.tensors.parameters(expected)

    @cached_property
    def _tokenizer(self) -> Tokenizer | str:
        return self.load_tokenizer()

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where the checkpoint has none to use (`tokenizer_problem` says why)."""
        return self._tokenizer if isinstance(self._tokenizer, Tokenizer) else None

    def tokenizer_problem(self) -> str | None:
        """Why `tokenizer()` is None, as a sentence; None when there is one."""
        return self._tokenizer if isinstance(self._tokenizer, str) else None


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter on disk. `target_layers`: how many its target has; 0 where the file does not say.

    `verifier`: what else it says of its target.
    """

    config: DrafterConfig
    name: str
    path: Path
    tensors: Tensors
    target_layers: int
    verifier: Verifier | None = None

    def parameters(self, expected: Mapping[str, Shape]) -> Iterator[tuple[str, np.ndarray]]:
        """See `Tensors.parameters`."""
        return self.tensors.parameters(expected)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies, and the name to show for it."""

    path: Path
    name: str


def find(spec: str | Place, revision: str | None = None, offline: bool = False) -> Place:
    """The place of what `spec` names: a local path, else a built-in or a model of the Hub, fetched if need be.

    revision: of a model of the Hub. offline: nothing is fetched. Raises UserError.
    """
    if isinstance(spec, Place):
        return spec
    if spec in builtin.BUILTIN:
        place = Place(builtin.fetch(builtin.BUILTIN[spec], offline), spec)
    elif (path := _local(spec)) is not None:
        place = Place(path, path.stem if path.is_file() else path.resolve().name)
    elif (hub_id := hub.parse(spec)) is not None:
        return Place(hub.fetch(hub_id, revision, offline), hub_id.repo)
    else:
        raise UserError(
            f"there is no file or folder {spec!r:.200}; pass a local checkpoint, a Hub id such as "
            f"Qwen/Qwen3-0.6B or the built-in {', '.join(builtin.BUILTIN)}"
        )
    if revision is not None:
        raise UserError(f"a revision was given, and {spec} is not on the Hub; drop the revision")
    return place


def open_target(
    spec: str | Place, revision: str | None = None, offline: bool = False, *, weights: bool = True
) -> TargetCheckpoint:
    """The target that `spec` names: a Hugging Face folder, a .gguf file, a folder with one, a built-in, a Hub id.

    Reads headers only; a built-in model or one of the Hub is downloaded where the cache lacks it. revision,
    offline: see `find`. weights: False for a folder that may have none; the checkpoint then has no tensors.
    Raises UserError.
    """
    place = find(spec, revision, offline)
    return replace(_open_target(place.path, weights), name=place.name)


def _open_target(path: Path, weights: bool) -> TargetCheckpoint:
    if path.is_file():
        return _open_gguf(path)
    config_file = path / "config.json"
    if not config_file.exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return _open_gguf(files[0])
        if files:
            raise UserError(f"{path} holds {len(files)} GGUF files; name the one to use")
    config = _read_config(path)
    if looks_like_drafter(config):
        raise UserError(f"{path} is a drafter, not a target; pass it as the draft model instead")
    model_type = hf_config.target_model_type(config)
    generation_file = path / "generation_config.json"
    generation = None
    if generation_file.exists():
        generation = Settings(read_json(generation_file), str(generation_file))
    return TargetCheckpoint(
        config=hf_config.decoder_config(config, model_type, generation),
        name=path.resolve().name,
        path=path,
        format="safetensors",
        tensors=_tensors(SafetensorsFolder(path) if weights else NoTensors(), DECODER_RULES, str(path)),
        load_tokenizer=lambda: from_folder(path),
    )


def open_drafter(
    spec: str | Place,
    anchor_predicts: bool | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> DrafterCheckpoint:
    """The drafter in a folder or on the Hub. Reads headers, and the map of a reduced vocabulary.

    anchor_predicts: whether row 0 (the anchor) predicts, for checkpoints that do not say so themselves. revision,
    offline: see `find`. Raises UserError, also where the checkpoint says otherwise or nobody does.
    """
    place = find(spec, revision, offline)
    path = place.path
    if path.is_file():
        raise UserError(f"{path} is a file; a drafter is a folder with config.json and model.safetensors")
    config = _read_config(path)
    dialect = find_dialect(config)
    if dialect is None:
        if set(hf_config.architectures(config)) & set(hf_config.TARGETS) and not looks_like_drafter(config):
            raise UserError(f"{path} is a target, not a drafter; pass it as the model instead")
        raise unknown_dialect(config)
    stored, config = dequantised(SafetensorsFolder(path), config)
    drafter = read_drafter(config, dialect, anchor_predicts)
    source, draft_vocab_size = full_vocabulary(stored, config, drafter.backbone.vocab_size)
    tensors = _tensors(source, dialect.rules, str(path))
    tensors = replace(tensors, unknown=tuple(n for n in tensors.unknown if not dialect.ignored.fullmatch(n)))
    drafter = with_tensors(drafter, tensors.found.keys(), draft_vocab_size)
    if drafter.own_embedding and not drafter.own_head and drafter.backbone.tie_embeddings:
        # A tied drafter with an embedding of its own has its head there too.
        head = Located("head.kernel", tensors.found["embed.embedding"].name, TRANSPOSE)
        tensors = replace(tensors, found={**tensors.found, head.path: head})
        drafter = replace(drafter, own_head=True)
    target_layers = config.integer("num_target_layers", 0, low=0, high=MAX_LAYERS)
    return DrafterCheckpoint(drafter, place.name, path, tensors, target_layers, read_verifier(config))


def is_drafter(place: Place) -> bool:
    """Whether it is a folder whose config.json is a drafter's; UserError when that cannot be read."""
    config_file = place.path / "config.json"
    return config_file.is_file() and looks_like_drafter(Settings(read_json(config_file), str(config_file)))


def _open_gguf(path: Path) -> TargetCheckpoint:
    file = GGUFFile(path)
    config = gguf_config.decoder_config(file)
    return TargetCheckpoint(
        config=config,
        name=path.stem,
        path=path,
        format="gguf",
        tensors=_tensors(file, gguf_config.rules(config), str(path)),
        load_tokenizer=lambda: gguf_vocabulary.tokenizer(file.metadata, str(path)),
    )


def _local(spec: str) -> Path | None:
    path = Path(spec).expanduser() if spec else None
    try:
        return path if path is not None and path.exists() else None
    except (OSError, ValueError):
        return None


def _read_config(folder: Path) -> Settings:
    path = folder / "config.json"
    return Settings(read_json(path), str(path))
