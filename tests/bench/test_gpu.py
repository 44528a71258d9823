"""bench/gpu.py and bench/gpu_all.py: their message without a GPU, and that an arm of theirs runs."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.process import ROOT

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
ARM = """
import torch
from bench.arms import gpu_arms
ours = gpu_arms.Ours("bf16", torch.device("cpu"), (2, 64, 128, 4, 2, 16, 300), max_num_seqs=4, context=256, chunk=128)
ours.engine._multi_step = None  # of a CPU alone: a step of eight tokens left `steps_s` waiting for steps that never came
assert ours.prefill_s(100) > 0 and len(ours.steps_s(3, 40, 5)) == 5 and len(ours.hit_s(200)) == 2
alone = [ours.tokens([prompt], 4)[0] for prompt in ([5, 6, 7], [8, 9])]
assert ours.tokens([[5, 6, 7], [8, 9]], 4) == alone and len(alone[0]) == 4
assert ours.token_bytes == 2 * 2 * 2 * 16 * 2  # layers, k and v, heads, head_dim, bytes
assert round(gpu_arms.prefill_flops(2048) / 1e12, 1) == 29.7
"""


@without_gpu
@pytest.mark.parametrize("command", [["bench/gpu.py", "--quick"], ["bench/gpu_all.py", "results"]])
def test_without_a_gpu_one_line_and_2(command):
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command[0]}: needs a CUDA device")
    assert not (ROOT / "results").exists()


def test_an_arm_runs():
    """On the CPU: the engine that the rows measure, put together as they do."""
    # Not in the interpreter, which this process may have asked for. With no PATH the compiler had another name, and all
    # kernels were compiled again, for 39 s.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ARM], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
