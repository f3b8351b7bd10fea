"""Eight-bit storage, and the drafter that comes with the package."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support import GOLDENS

from jspark.calibration import read_temperatures
from jspark.checkpoint import open_drafter
from jspark.checkpoint.export import export_drafter
from jspark.checkpoint.shipped import shipped_drafter
from jspark.errors import UserError
from jspark.loading import find_drafter
from jspark.weights import drafter_shapes

NAME = "dspark_qwen3_tiny_gated_trained"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "small"
    export_drafter(open_drafter(str(GOLDENS / NAME)), folder, dtype="int8")
    return folder


def test_eight_bits_are_within_half_a_step_of_each_row(small):
    whole, ours = open_drafter(str(GOLDENS / NAME)), open_drafter(str(small))
    shapes = drafter_shapes(whole.config)
    assert ours.config == whole.config
    near = dict(ours.parameters(shapes))
    for name, value in whole.parameters(shapes):
        # Rows of the file are columns of our kernels; embeddings and W1 are as in the file.
        axis = 1 if name.endswith(("embedding", "w1")) else 0
        step = np.abs(value).max(axis=axis, keepdims=True) / 127 if value.ndim == 2 else 0.0
        assert (np.abs(near[name] - value) <= 0.5001 * step).all(), name


def test_scales_that_are_lost_are_noticed(small, tmp_path):
    from safetensors.numpy import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(small, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["fc.weight_scale"]
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(UserError, match=r"fc.weight is stored in int8 without its scales"):
        open_drafter(str(broken))
    held = json.loads((small / "config.json").read_text())
    held["quantization_config"]["quant_method"] = "another"
    (broken / "config.json").write_text(json.dumps(held))
    with pytest.raises(UserError, match="quantised weights"):
        open_drafter(str(broken))


def test_the_built_in_target_has_a_drafter_of_its_own():
    shipped = shipped_drafter("smollm2-135m", "DSPARK")
    assert shipped is not None
    assert sum(f.stat().st_size for f in shipped.folder.iterdir()) < 24e6
    found = find_drafter(None, "DSPARK", target="smollm2-135m")
    assert found is not None
    assert found.checkpoint is not None
    config = found.checkpoint.config
    assert (config.block_size, config.markov, config.confidence) == (7, "vanilla", "hidden+markov")
    if shipped.calibration is not None:
        assert read_temperatures(shipped.calibration).table(7).shape == (2, 7)
    # Asked for by its algorithm only, and never for a path of that name.
    assert find_drafter(None, None, target="smollm2-135m") is None
    with pytest.raises(UserError, match="needs a drafter"):
        find_drafter(None, "DFLASH", target="smollm2-135m")
    with pytest.raises(UserError, match="needs a drafter"):
        find_drafter(None, "DSPARK", target="./smollm2-135m")
