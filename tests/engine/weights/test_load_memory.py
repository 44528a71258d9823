"""Loading maps the file and packs weight by weight: at no time are there two copies."""

import json
import subprocess
import sys

import pytest
import torch

from baton.engine.layers.linear import packed
from tests.support.model_folders.families import make_folder

# A layer's weights as they are read, merged and packed, what torch itself takes, and what malloc does not give back at
# once: of int4 21 to 31 MiB.
MARGIN = 36 << 20
LOAD = """
import json, sys, threading, time
from baton.engine.core.config import EngineConfig
from baton.engine.models.loader import load_model

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

load_model(EngineConfig(sys.argv[1], quantization=sys.argv[3]))  # the library, torch's threads
before, peak, over = held(), 0, threading.Event()

def watch():
    global peak
    while not over.wait(0.0005):
        peak = max(peak, held())

thread = threading.Thread(target=watch)
thread.start()
model = load_model(EngineConfig(sys.argv[2], quantization=sys.argv[3]))
over.set()
thread.join()
weights = model.weights
print(json.dumps({"peak": peak - before, "resident": weights.num_bytes, "file": weights.file_bytes}))
"""


@pytest.mark.skipif(bool(packed.unavailable()), reason=packed.unavailable() or "native kernels")
@pytest.mark.parametrize("quantization", ["auto", pytest.param("int4-g32", marks=pytest.mark.long)])
def test_no_second_copy(tmp_path, quantization):
    sizes = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=512)
    for name, changes in (("small", {}), ("large", sizes)):
        base = dict(hidden_size=64, intermediate_size=128, vocab_size=256)
        make_folder(tmp_path / name, "llama3", torch.bfloat16, **(base | changes))
    command = [sys.executable, "-c", LOAD, tmp_path / "small", tmp_path / "large", quantization]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert found["file"] > 3 * MARGIN
    assert found["resident"] <= 1.05 * found["file"]
    assert found["peak"] <= 1.05 * found["resident"] + MARGIN
