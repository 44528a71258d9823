"""Step 5: decode with an engine in the shape of an 8B model: the time per token, and that serving compiles no kernel
and takes no more memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from baton.cli.gpu.check import Say
from baton.cli.gpu.random_engine import BLOCK_SIZE, LLAMA_8B, RandomEngine, make_spec
from baton.engine.core.device import GIB, Memory
from baton.planning.memory import linear_shapes

BATCHES = (1, 64, 256)
NUM_STEPS = 200
# tokens of the warm-up; with four, some sequences would end before the last prompt is read, and no draw would cover all
NUM_WARM = 32
PROMPT = 100
STEP_BYTES = 2 * GIB  # besides weights and pool: a step's buffers, its graphs and the libraries; an estimate
SAMPLINGS = {"greedy": {}, "top_p": dict(temperature=0.6, top_p=0.9, seed=1)}


def check(
    say: Say,
    model: Path | None,
    device: torch.device | None = None,
    sizes=LLAMA_8B,
    batches: Sequence[int] = BATCHES,
    num_steps: int = NUM_STEPS,
) -> None:
    device = device or torch.device("cuda", 0)
    context = 2 * (PROMPT + num_steps)
    batches = _fitting(say, batches, partial(_bytes_of, sizes, context), _free(device))
    if not batches:
        return
    made = RandomEngine("bf16", device, sizes, exact=True, max_num_seqs=max(batches), context=context, chunk=2048)
    watch = made.launcher.compiling
    for batch_size in batches:
        for name, sampling in SAMPLINGS.items():
            prompts = [made.ids(PROMPT + row % 3) for row in range(batch_size)]
            made.answers(prompts, min(num_steps, NUM_WARM), **sampling)
            kernels, held = watch.num_kernels if watch else 0, _held(device)
            seconds, cpu_s = _steps(made, prompts, num_steps, sampling)
            grown = _held(device) - held
            compiled = watch.num_kernels - kernels if watch else 0
            text = f"{seconds * 1e3:.2f} ms a step, {cpu_s * 1e3:.2f} of them Python's, "
            text += f"{compiled} kernels compiled and {grown >> 20} MiB taken meanwhile"
            say(f"batch {batch_size}, {name}", compiled == 0 and grown <= 0, text)
    made.close()


def _steps(made: RandomEngine, prompts: list[list[int]], num_steps: int, sampling: dict) -> tuple[float, float]:
    """Return the median time of a step, and the mean CPU time of one (s)."""
    begun = time.thread_time()
    times: list[float] = []
    for ids in prompts:
        made.engine.submit(made.request(ids, num_steps, **sampling))
    while made.engine.has_work():
        before = time.perf_counter()
        made.engine.step()
        times.append(time.perf_counter() - before)
    return statistics.median(times), (time.thread_time() - begun) / len(times)


def _fitting(say: Say, batches: Sequence[int], bytes_of: Callable[[int], int], free: float) -> list[int]:
    """Return the batches that fit in memory, and report those that do not."""
    found = []
    for batch_size in batches:
        if (needed := bytes_of(batch_size)) <= free:
            found.append(batch_size)
        else:
            say(f"batch {batch_size}", None, f"takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} are free")
    return found


def _bytes_of(sizes: tuple[int, ...], context: int, batch_size: int) -> int:
    """Return the memory of an engine with bf16 weights and a pool for `batch_size` contexts."""
    spec = make_spec(sizes, context)
    num_weights = sum(count * outputs * inputs for (outputs, inputs), count in linear_shapes(spec).items())
    num_weights += 2 * spec.vocab_size * spec.hidden_size  # embedding and output head
    token_bytes = spec.kv_layout("bf16", BLOCK_SIZE).block_bytes // BLOCK_SIZE
    return 2 * num_weights + batch_size * context * token_bytes + STEP_BYTES


def _free(device: torch.device) -> float:
    return Memory.of(device).free if device.type == "cuda" else float("inf")


def _held(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
