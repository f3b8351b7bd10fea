"""Folders of checkpoints for tests: spoiling them, and seeing them refused."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from jspark.errors import UserError

DSPARK = "dspark_qwen3_tiny_"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def refused(opening, spec, *words: str) -> None:
    """Opening raises one sentence in which all `words` occur."""
    with pytest.raises(UserError) as e:
        opening(str(spec))
    message = str(e.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def split(folder: Path, shards: int) -> None:
    tensors = load_file(folder / "model.safetensors")
    where = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()
