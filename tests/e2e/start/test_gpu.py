"""Two workers on one GPU answer as one, and KV goes from GPU memory to GPU memory."""

import subprocess
import sys

import pytest

from kvtransfer.memory.cuda_runtime import find_runtime
from tests.support.client import Client
from tests.support.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_runtime() is None, reason="needs a CUDA device")]
OPTIONS = ("--device", "cuda", "--gpu-memory-utilization", "0.2", "--num-blocks", "160")
MAX_TOKENS = 12


def test_two_workers_on_one_gpu_answer_as_one(model, prompts, tmp_path):
    with (
        Stack(model, tmp_path / "split", options=OPTIONS, gateway_options=("--split", "always")) as split,
        Stack(model, tmp_path / "whole", num_prefill=0, options=OPTIONS) as whole,
    ):
        clients = Client(split.target), Client(whole.target)
        for seed, num_tokens in enumerate((31, 200, 300)):
            prompt_ids, sampling = prompts(num_tokens), {"temperature": 0.9, "seed": seed, "n": 2}
            ours, theirs = (client.generate(prompt_ids, max_tokens=MAX_TOKENS, **sampling) for client in clients)
            assert ours.timing.transfer_s > 0 and not theirs.timing.transfer_s
            for choice, wanted in theirs.choices.items():
                assert ours.choices[choice].token_ids == wanted.token_ids
        argv = [sys.executable, "-m", "baton.cli.main", "doctor", "--target", split.target]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout
        (chosen,) = [line for line in done.stdout.splitlines() if "chosen" in line]
        assert "cuda_ipc: " in chosen
        for client in clients:
            client.close()
