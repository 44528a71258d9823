"""Two engines on one GPU, in a process each: what decoding loses while the other reads prompts, and the reverse.

Kernels of two processes run at the same time only under CUDA's Multi-Process Service (nvidia-cuda-mps-control -d,
before anything else uses the GPU); otherwise they take turns. Prompts can be limited to a share of the
multiprocessors."""

import multiprocessing
import os
import time
from dataclasses import dataclass

import torch

from bench.arms import gpu_arms
from bench.lib.report import nearest_rank

DECODE_BATCH, DECODE_CONTEXT = 32, 1024
PREFILL_SHARE = 0.7  # of the multiprocessors, in the row with a share
PROMPT, CHUNK = 8192, 2048  # a decode step may have to wait for a step of 2,048 tokens


@dataclass(frozen=True)
class Interference:
    idle_p99_s: float
    loaded_p99_s: float
    solo_prefill: float  # tokens/s
    loaded_prefill: float


def has_mps() -> bool:
    """Return whether the Multi-Process Service runs here."""
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control"))


def measure(quick: bool, sm_share: float | None = None) -> Interference:
    """Measure both engines, which are loaded before anything is timed. `sm_share`: of the engine that reads prompts."""
    num_steps, seconds = (200, 3.0) if quick else (1000, 10.0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_prompts, args=(theirs, sm_share), daemon=True)
    child.start()
    try:
        ours.recv()  # ready
        decode = gpu_arms.Ours(
            "bf16", torch.device("cuda"), max_num_seqs=DECODE_BATCH, context=DECODE_CONTEXT + num_steps + 256
        )
        idle = nearest_rank(decode.steps_s(DECODE_BATCH, DECODE_CONTEXT, num_steps), 99)
        ours.send(seconds)
        solo = ours.recv()
        ours.send(600.0)  # until it is asked to stop
        loaded = nearest_rank(decode.steps_s(DECODE_BATCH, DECODE_CONTEXT, num_steps), 99)
        ours.send("stop")
        return Interference(idle, loaded, solo, ours.recv())
    finally:
        child.terminate()
        child.join()


def _read_prompts(pipe, sm_share: float | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ours = gpu_arms.Ours("bf16", device, max_num_seqs=4, context=PROMPT + 256, chunk=CHUNK, sm_share=sm_share)
    ours.prefill_s(PROMPT)
    pipe.send("ready")
    while True:
        limit_s = pipe.recv()
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < limit_s and not pipe.poll():
            ours.prefill_s(PROMPT)
            count += 1
        if pipe.poll():
            pipe.recv()
        pipe.send(count * PROMPT / (time.perf_counter() - begun))
