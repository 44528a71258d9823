"""Compare two ranks, or two stages, of one thread with one process of two threads on this CPU: python bench/parallel.py
[--quick] [--only PART ...] [--json FILE].

sums      a sum of both ranks alone, beside a turn in which nothing is said and beside gloo
engines   the same bare engine, model and prompts, in turn: the shipped model, and a larger one of random weights
stages    decode over two stages whose steps are of different sequences, and a step at a time, of the same engine
handoff   KV of one prompt, from a prefill worker of two ranks or of one to a decode worker of one
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import itertools
import mmap
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import distributed

from baton.cli.cluster.handover import Session, hand_over
from baton.engine.engine import Engine
from baton.engine.parallel.collectives import Collectives, num_bytes_for
from baton.engine.parallel.shard import Shard
from baton.service.net.client import open_channel
from baton.service.security.access import Access
from bench.lib.cpu_time import cpu_s
from bench.lib.paths import MODEL
from bench.lib.random_model import write_random_model
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support import bare_engine
from tests.support.stack import Stack

PARTS = ("sums", "engines", "stages", "handoff")

PROMPT, OUTPUT = 64, 48  # tokens of the decode rows
LONG_PROMPT, SHORT_PROMPT = 512, 4
HIDDEN = 4096  # of the rows that are summed, as in an 8B model
HANDED = 1536  # tokens whose KV is handed over: 3.5 KiB each
HANDOFF_S = 30.0


class Speed(NamedTuple):
    """Speed over prompt and output tokens, from submit to the last end."""

    tokens_per_s: float
    cpu_us: float  # per token: all ranks, including their spinning


class Arm:
    """One engine, and prompts that were never sent before."""

    def __init__(self, model: Path, num_threads: int, **options):
        self.engine: Engine = bare_engine.load_engine(model, threads=num_threads, num_blocks=512, **options)
        pids = self.engine.ranks.pids if self.engine.ranks is not None else []
        self._processes = [psutil.Process(), *map(psutil.Process, pids)]
        self._num_threads = num_threads
        self._rng = random.Random(0)
        self._request_ids = map(str, itertools.count())

    def speed(self, batch_size: int, num_prompt: int, num_output: int) -> Speed:
        torch.set_num_threads(self._num_threads)
        vocab_size = self.engine.spec.vocab_size
        prompts = [[self._rng.randrange(5, vocab_size) for _ in range(num_prompt)] for _ in range(batch_size)]
        requests = [bare_engine.bare_request(next(self._request_ids), ids, max_tokens=num_output) for ids in prompts]
        begun, used = time.perf_counter(), self._ranks_cpu_s()
        bare_engine.serve_alone(self.engine, requests)
        num_tokens = batch_size * (num_prompt + num_output)
        return Speed(num_tokens / (time.perf_counter() - begun), 1e6 * (self._ranks_cpu_s() - used) / num_tokens)

    def close(self) -> None:
        if self.engine.ranks is not None:
            self.engine.ranks.close()

    def _ranks_cpu_s(self) -> float:
        return sum(map(cpu_s, self._processes))


def compare_engines(report: Report, name: str, model: Path, num_rounds: int) -> None:
    """Compare engines. Goals of ranks that share layers: prompts at least 0.85 of one process, decode 0.8, and the tree
    of sums 0.95 of plain ones. Stages wait for one another in decode."""
    alone = Arm(model, 2)
    arms = {
        "two ranks": Arm(model, 1, tensor_parallel=2),
        "two ranks, fast sums": Arm(model, 1, tensor_parallel=2, all_reduce="fast"),
        "two stages": Arm(model, 1, pipeline_parallel=2),
        "alone": alone,
        "A/A, one": alone,
    }
    try:
        for what, goal, *shape in (
            (f"prompt of {LONG_PROMPT}", "ratio >= 0.85", 1, LONG_PROMPT, 1),
            ("batch 1", "ratio >= 0.8", 1, PROMPT, OUTPUT),
            ("batch 16", "ratio >= 0.8", 16, PROMPT, OUTPUT),
        ):
            _compare_speeds(report, f"{name}, {what}", arms, shape, goal, num_rounds)
    finally:
        for arm in arms.values():
            arm.close()


def compare_stages(report: Report, name: str, model: Path, sizes: Sequence[int], num_rounds: int) -> None:
    """Compare stages. With few sequences there is one step at a time either way."""
    arm = Arm(model, 1, pipeline_parallel=2)

    def measure(overlaps: bool, batch_size: int, speeds: list[Speed]) -> float:
        arm.engine.runner.launcher.overlaps = overlaps
        speeds.append(arm.speed(batch_size, SHORT_PROMPT, OUTPUT))
        return speeds[-1].tokens_per_s

    try:
        for batch_size in sizes:
            speeds: dict[str, list[Speed]] = {"in each stage": [], "at a time": [], "A/A, at a time": []}
            arms = {
                each: partial(measure, each == "in each stage", batch_size, column) for each, column in speeds.items()
            }
            interleave(arms, 1)  # warm
            for column in speeds.values():
                column.clear()
            found = medians(interleave(arms, num_rounds))
            cpu_us = {each: statistics.mean(speed.cpu_us for speed in column) for each, column in speeds.items()}
            for each in ("in each stage", "A/A, at a time"):
                row = f"{name}, two stages, decode at batch {batch_size}: a step {each} over one at a time"
                goal = "ratio >= 1.2" if batch_size == 16 and each == "in each stage" else ""
                report.add(row, found[each], "tokens/s", against=found["at a time"], goal=goal)
                report.add(f"{row}, CPU", cpu_us[each], "us/token", against=cpu_us["at a time"])
    finally:
        arm.close()


def _compare_speeds(
    report: Report, name: str, arms: dict[str, Arm], shape: list[int], goal: str, num_rounds: int
) -> None:
    speeds: dict[str, list[Speed]] = {each: [] for each in arms}

    def measure(each: str) -> Callable[[], float]:
        def once() -> float:
            speeds[each].append(arms[each].speed(*shape))
            return speeds[each][-1].tokens_per_s

        return once

    measured = {each: measure(each) for each in arms}
    interleave(measured, 1)  # warm
    for each in speeds.values():
        each.clear()
    found = medians(interleave(measured, num_rounds))
    # The system counts in steps of 10 ms, so the sum of all rounds is used, not the median.
    cpu_us = {each: statistics.mean(speed.cpu_us for speed in column) for each, column in speeds.items()}
    for each in arms:
        if each == "alone":
            continue
        added = goal if each == "two ranks" else ""
        report.add(f"{name}: {each} over one", found[each], "tokens/s", against=found["alone"], goal=added)
        report.add(f"{name}: {each} over one, CPU", cpu_us[each], "us/token", against=cpu_us["alone"])
    tree, plain = found["two ranks"], found["two ranks, fast sums"]
    report.add(f"{name}: exact sums over fast ones", tree, "tokens/s", against=plain, goal="ratio >= 0.95")


def compare_handoffs(report: Report, folder: Path, num_rounds: int) -> None:
    """Hand over the same KV from two ranks and from one: at most 1.1 of the time, from the first request for KV to the
    last confirmation. All KV is ready before it is requested."""
    options = ("--threads", "1", "--num-blocks", "256")
    with (
        Stack(MODEL, folder / "one", num_gateways=0, options=options) as one,
        Stack(
            MODEL, folder / "two", num_gateways=0, options=options, prefill_options=("--tensor-parallel", "2")
        ) as two,
        asyncio.Runner() as runner,
    ):
        runner.run(_compare_handoffs(report, one, two, num_rounds))


async def _compare_handoffs(report: Report, one: Stack, two: Stack, num_rounds: int) -> None:
    async with AsyncExitStack() as exits:

        async def session(stack: Stack, name: str) -> Session:
            channel = await exits.enter_async_context(open_channel(stack.address[name], Access()))
            return await exits.enter_async_context(Session(channel, stack.address[name]))

        pairs = {
            name: (await session(stack, "prefill0"), await session(stack, "decode0"))
            for name, stack in (("two ranks", two), ("one", one), ("one again", one))
        }
        found: dict[str, list[float]] = {name: [] for name in pairs}
        for index in range(-1, num_rounds):
            for name in pairs if index % 2 else reversed(pairs):
                handed = await hand_over(*pairs[name], HANDED, None, False, HANDOFF_S)
                if index >= 0:  # earlier ones warmed up
                    found[name].append(1e3 * handed.transfer_s)
        taken, name = medians(found), f"handoff of {handed.num_bytes / 1e6:.1f} MB by {handed.transport}"
        against = taken["one"]
        report.add(f"{name}: two ranks to one over one to one", taken["two ranks"], "ms", against=against, goal="ratio <= 1.1")  # fmt: skip
        report.add(f"{name}: A/A, one to one over the same", taken["one again"], "ms", against=against)


def compare_sums(report: Report, num_rounds: int) -> None:
    """Measure sums between two threads, which meet as two processes do. A turn is a message of 4 bytes both ways
    through the same memory."""
    torch.set_num_threads(1)
    memory = memoryview(mmap.mmap(-1, num_bytes_for(2)))
    ends = [Collectives(memory, Shard(rank, 2)) for rank in range(2)]
    groups, word = _gloo(), torch.zeros(1)
    for num_tokens, num_sums in ((1, 200), (16, 200), (512, 50)):
        part = torch.randn(num_tokens, HIDDEN)
        rounded = part.bfloat16()
        arms = dict.fromkeys(("exact", "A/A"), lambda: _us(ends, num_sums, lambda end: end.sum(part, torch.bfloat16)))
        arms |= {
            "fast": lambda: _us(ends, num_sums, lambda end: end.sum(rounded, torch.bfloat16)),
            "turn": lambda: _us(ends, num_sums, lambda end: end.gather(word, wanted=False)),
            "gloo": lambda: _us(groups, num_sums, lambda group: group.allreduce([rounded.clone()]).wait()),
        }
        interleave(arms, 1)
        found = medians(interleave(arms, num_rounds))
        name, goal = f"sum of {num_tokens} x {HIDDEN}", "ratio < 2" if num_tokens == 1 else ""
        report.add(f"{name} over a bare turn", found["exact"], "us", against=found["turn"], goal=goal)
        report.add(f"{name}, parts in bf16, over one in fp32", found["fast"], "us", against=found["exact"])
        report.add(f"{name} over gloo in bf16", found["exact"], "us", against=found["gloo"])
        report.add(f"{name}: A/A", found["A/A"], "us", against=found["exact"])


def _gloo() -> list:
    store, groups = distributed.HashStore(), [None, None]

    def join(rank: int) -> None:
        groups[rank] = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups


def _us(ends: list, count: int, act: Callable) -> float:
    """Return the time of one of `count` acts of both ends, which meet in each."""

    def repeat(end) -> None:
        for _ in range(count):
            act(end)

    other = threading.Thread(target=repeat, args=(ends[1],))
    begun = time.perf_counter()
    other.start()
    repeat(ends[0])
    other.join()
    return 1e6 * (time.perf_counter() - begun) / count


def main() -> int:
    arguments, report = start("parallel", "Two ranks of a model against one process with as many threads.", PARTS)
    num_rounds = 3 if arguments.quick else 11
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "sums" in arguments.only:
            compare_sums(report, num_rounds)
        if "engines" in arguments.only:
            compare_engines(report, "shipped model", MODEL, num_rounds)
            compare_engines(report, "hidden size 1024", write_random_model(folder / "large"), num_rounds)
        if "stages" in arguments.only:
            sizes = (16,) if arguments.quick else (1, 8, 16, 32)
            compare_stages(report, "shipped model", MODEL, sizes, num_rounds)
            compare_stages(report, "hidden size 1024", write_random_model(folder / "deep"), sizes, num_rounds)
        if "handoff" in arguments.only:
            compare_handoffs(report, folder, num_rounds)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
