"""A worker given a quantized model that cannot be right says which file and tensor in one line, and ends with 2."""

import shutil

import pytest
import torch

from tests.support.model_folders import quantized_folders
from tests.support.process import assert_one_line

PROJECTION = "model.layers.1.mlp.up_proj"


@pytest.fixture
def gptq(model, tmp_path):
    quantized_folders.dense_folder(tmp_path)
    quantized_folders.write_gptq(tmp_path)
    shutil.copy(model / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("part", "value", "words"), [("scales", float("nan"), "NaN or infinite"), ("qweight", None, "is missing")]
)
def test_a_tensor_that_is_wrong(start, gptq, part, value, words):
    name = f"{PROJECTION}.{part}"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name][0, 0] = value

    quantized_folders.change_tensors(gptq, change)
    status, stderr = start("decode_worker", "--model", str(gptq), "--listen", "127.0.0.1:0")
    assert status == 2
    assert_one_line(stderr, str(gptq / "model.safetensors"), name, words)
