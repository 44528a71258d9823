"""A worker whose model cannot be served ends at once: status 2, one line that names the file and the tensor."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.model_folders import quantized_folders
from tests.support.process import ROOT


def unknown_method(folder: Path) -> Path:
    quantized_folders.change_config(folder, quantization_config={"quant_method": "aqlm"})
    return folder


def nan_scales(folder: Path) -> Path:
    quantized_folders.write_gptq(folder)
    name = "model.layers.0.mlp.down_proj.scales"
    quantized_folders.change_tensors(folder, lambda tensors: tensors[name].fill_(torch.nan))
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    return path


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (unknown_method, ("config.json", "method aqlm is not supported, one of gptq, awq")),
        (nan_scales, ("model.safetensors", "model.layers.0.mlp.down_proj.scales", "NaN")),
        (truncated_gguf, ("model.gguf: truncated or not a GGUF file",)),
    ],
)
def test_status_and_message(tmp_path, make, parts):
    quantized_folders.dense_folder(tmp_path, tie_word_embeddings=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = make(tmp_path)
    argv = [sys.executable, "-m", "decode_worker", "--model", str(model), "--num-blocks", "20"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("decode_worker: ") and all(part in last for part in parts), last
