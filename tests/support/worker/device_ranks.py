"""Workers whose ranks have a GPU each, on a CPU: gloo in place of NCCL, torch's operators in place of Triton's kernels,
and a stand-in for libcudart over files, by which processes reach each other's pools. As a program it is one rank, with
its KV, or the program that is named, whose ranks are such."""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine import loading
from baton.engine.gpu_ranks import build
from baton.worker import app, settings
from baton.worker.ranks import device
from kvtransfer.memory.cuda_runtime import CudaRuntime
from tests.support.engine.cpu_as_gpu import stand_in
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host
from tests.support.worker import scripted
from tests.support.worker.stand_in_pool import StandInPool

FOLDER = "BATON_TEST_GPUS"
OPTIONS = {
    "attention": "reference", "block_size": 16, "num_blocks": 64, "max_num_seqs": 4, "max_model_len": 256,
    "max_num_batched_tokens": 128, "threads": 1,
}  # fmt: skip


def stand_in_workers(replace: Callable[[object, str, object], None], folder: Path) -> None:
    """Let workers in this process have GPUs, as they see it, by `replace(object, name, value)`. `folder`: where the
    memory of these is, which their ranks find in the environment."""
    stand_in(replace)
    host = Host(folder)
    for module in (scripted, app):
        replace(module, "PoolMemory", lambda mirror_gib: StandInPool(host, mirror_gib))
    replace(settings, "find_runtime", lambda: CudaRuntime(Cudart(host)))
    replace(device, "PROGRAM", "tests.support.worker.device_ranks")
    replace(loading, "find_device", lambda name: torch.device("cuda", 0))  # of several ranks alone
    replace(build, "devices_for", lambda config: [torch.device("cpu")] * config.num_ranks)


def main() -> None:
    folder = Path(os.environ[FOLDER])
    if len(sys.argv) > 1:
        stand_in_workers(setattr, folder)
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        stand_in(setattr)
        device.PoolMemory = lambda: StandInPool(Host(folder))
        device.main()


if __name__ == "__main__":
    main()
