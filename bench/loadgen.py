"""Measure how much the load generator itself can send: python bench/loadgen.py [--quick] [--json FILE].

A stub in a process on another core answers every call with eight messages. The sender and its baseline, a bare grpc.aio
loop, have one core to themselves and take turns on it."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc

from baton.loadgen.plan import RunPlan
from baton.loadgen.run import run_jobs
from baton.loadgen.workload import Job
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support.process import Process

CORES = sorted(os.sched_getaffinity(0))
SENDER_CORE, STUB_CORE = CORES[0], CORES[-1]
NUM_MESSAGES, NUM_PROMPT, CONCURRENCY, VOCAB = 8, 256, 16, 4096


class Rate(NamedTuple):
    calls_per_s: float
    calls_per_cpu_s: float  # of the sender: what it could reach if the stub were never the limit


class Bare:
    """The least that a Python client can do: send one prepared request repeatedly and count the messages."""

    def __init__(self, target: str):
        self._target = target
        ids = pb.TokenIds(ids=[5] * NUM_PROMPT)
        self._request = pb.GenerateRequest(token_ids=ids, stopping=pb.Stopping(max_tokens=NUM_MESSAGES))

    def run(self, num_calls: int) -> Rate:
        return asyncio.run(self._run(num_calls))

    async def _run(self, num_calls: int) -> Rate:
        async with grpc.aio.insecure_channel(self._target) as channel:
            generate = inference_pb2_grpc.InferenceStub(channel).Generate
            waiting = iter(range(num_calls))

            async def work() -> None:
                for _ in waiting:
                    num = 0
                    async for _message in generate(self._request, timeout=60):
                        num += 1
                    assert num == NUM_MESSAGES

            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
            return Rate(num_calls / (time.perf_counter() - wall), num_calls / (time.process_time() - cpu))


def jobs(num: int, per_s: float | None = None) -> list[Job]:
    return [Job(index, index / per_s if per_s else 0.0, NUM_PROMPT, NUM_MESSAGES) for index in range(num)]


def closed(report: Report, target: str, num_calls: int, num_rounds: int) -> float:
    """Send as fast as one process can; return the bare loop's calls per second. The generator's requests all differ,
    and its first ones are always made before the run; the bare loop's one request is made before it too."""
    bare, plan = Bare(target), RunPlan(target, VOCAB, CONCURRENCY)
    rates: dict[str, list[Rate]] = {}

    def generator() -> Rate:
        ran = run_jobs(plan, jobs(num_calls))
        assert all(outcome.num_messages == NUM_MESSAGES for outcome in ran.outcomes)
        return Rate(num_calls / ran.duration_s, num_calls / (ran.cpu_share * ran.duration_s))

    def noted(name: str, run: Callable[[], Rate]) -> Callable[[], float]:
        def arm() -> float:
            rates.setdefault(name, []).append(run())
            return rates[name][-1].calls_per_s

        return arm

    def loop() -> Rate:
        return bare.run(num_calls)

    generator(), loop()  # warm
    arms = {"generator": generator, "bare": loop, "bare again": loop}
    wall = medians(interleave({name: noted(name, run) for name, run in arms.items()}, num_rounds))
    cpu = medians({name: [rate.calls_per_cpu_s for rate in each] for name, each in rates.items()})
    name = f"{NUM_MESSAGES} messages a call, {CONCURRENCY} at a time"
    for what, unit, found in (("", "calls/s", wall), (", sender's CPU alone", "calls/CPU s", cpu)):
        report.add(f"{name}{what}", found["generator"], unit, against=found["bare"], goal="ratio >= 0.85")
        report.add(f"{name}{what}: A/A, bare over bare", found["bare again"], unit, against=found["bare"])
    return wall["bare"]


def processes(report: Report, target: str, calls_per_s: float, seconds: float, num_rounds: int) -> None:
    """Send the same arrivals from one process and from two, each with half of them."""
    os.sched_setaffinity(0, CORES)
    load = jobs(round(calls_per_s * seconds), calls_per_s)

    def busiest(num_processes: int) -> float:
        ran = run_jobs(RunPlan(target, VOCAB, num_processes=num_processes), load)
        assert all(outcome.ok for outcome in ran.outcomes)
        return ran.cpu_share

    arms = {"one": partial(busiest, 1), "two": partial(busiest, 2), "one again": partial(busiest, 1)}
    found = medians(interleave(arms, num_rounds))
    name, one = f"open loop, {calls_per_s:.0f} calls/s: busiest sender", found["one"]
    report.add(f"{name}, two processes over one", found["two"], "of a core", against=one, goal="ratio <= 0.65")
    report.add(f"{name}: A/A, one over one", found["one again"], "of a core", against=one)


def main() -> int:
    arguments, report = start("loadgen", "What the load generator itself can send.")
    os.sched_setaffinity(0, {SENDER_CORE})
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            "taskset",
            "-c",
            str(STUB_CORE),
            sys.executable,
            "-m",
            "bench.processes.writing_server",
            str(NUM_MESSAGES),
        ]
        stub = Process("stub", argv, Path(folder))
        try:
            target = stub.ready()["grpc"]
            calls_per_s = closed(report, target, 800 if arguments.quick else 3000, 3 if arguments.quick else 9)
            seconds, num_rounds = (4, 1) if arguments.quick else (10, 3)
            processes(report, target, calls_per_s / 4, seconds, num_rounds)
        finally:
            stub.kill()
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
