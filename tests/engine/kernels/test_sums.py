"""The numerics class of workers whose Triton kernels sum otherwise."""

import os
import shutil

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
pytest.importorskip("triton")

from baton.engine import kernels
from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.kernels import sums
from baton.engine.models import decoder
from kvtransfer.compatible import EXACT, MIXED, gives, relation
from tests.support.model_folders.families import make_few_heads


def name_with(folder, name, old, new) -> str:
    for each in sums.SOURCES:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sums.ENGINE / each, folder / each)
    code = (folder / name).read_text()
    assert code.count(old) >= 1
    (folder / name).write_text(code.replace(old, new, 1))
    return sums.order_of_sums(folder)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("attention/triton_paged.py", "\nBLOCK_N = 32", "\nBLOCK_N = 64"),
        ("layers/linear/triton.py", "\nMIN_SEGMENT = 512", "\nMIN_SEGMENT = 256"),
        ("weights/on_gpu.py", "= 128, 32", "= 64, 32"),
        ("kernels/paged_attention.py", "total * kept + tl.sum(weights, 1)", "tl.sum(weights, 1) + total * kept"),
    ],
)
def test_another_order_is_another_name(tmp_path, name, old, new):
    assert name_with(tmp_path, name, old, new) != sums.order_of_sums()


def test_other_words_are_not(tmp_path):
    assert name_with(tmp_path, "kernels/paged_attention.py", '"""Attention', '"""Of attention') == sums.order_of_sums()


@pytest.mark.skipif(kernels.INTERPRETED is False, reason="Triton's interpreter is off in this process")
def test_workers_of_two_orders_are_told_apart_at_hello(tmp_path, monkeypatch):
    """They still exchange KV, as mixed; before, their classes were equal and the exchange was called exact."""
    make_few_heads(tmp_path)
    config = EngineConfig(tmp_path, device="cpu", attention="triton", block_size=16, num_blocks=4, max_model_len=64)
    engine = Engine.load(config)
    ours = str(engine.numerics_class)
    assert f"+{sums.order_of_sums()}" in ours
    assert relation(engine.layout, ours, engine.layout, ours) == EXACT
    monkeypatch.setattr(decoder, "order_of_sums", lambda: "triton3.9.0-00000000")
    theirs = str(engine.numerics_class)
    assert relation(engine.layout, ours, engine.layout, theirs) == MIXED
    assert gives(engine.layout, ours)[0] != gives(engine.layout, theirs)[0]


def test_without_triton_there_is_none(tmp_path):
    make_few_heads(tmp_path)
    config = EngineConfig(tmp_path, device="cpu", attention="reference", block_size=16, num_blocks=4, max_model_len=64)
    assert "triton" not in str(Engine.load(config).numerics_class)
