"""The handoff: KV at the speed of the machine, hidden behind prefill. python bench/handoff.py [--quick] [--json FILE]
[--only PART].

First every transport is compared with a bare copy by the same means, in the same two processes, in turn. Then two
workers are compared with one: the client's wait between its first and second token, for the same prompts split and
whole."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import grpc
import numpy as np
import uvloop

from baton.training.model.llama import ModelConfig
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from bench.lib.random_model import write_random_model
from bench.lib.report import Report, finish, interleave, medians, nearest_rank, start
from bench.processes.kv_source import BLOCK_TOKENS, Pair, scattered
from kvtransfer.layout import KVGroup, KVLayout, Range
from kvtransfer.memory.blocks import BlockMemory, Cells
from kvtransfer.memory.byte_runs import BoxOfPool, merged_runs
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.digest import make_digests
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transports.nixl_engine import find_package
from tests.support.stack import Stack

KIB, MIB = 1 << 10, 1 << 20
# Counts of blocks by their bytes.
SIZES = {64 * KIB: (1, 64, 1024), MIB: (1, 64, 256), 2 * MIB: (1, 32, 128), 8 * MIB: (1, 8, 32)}
QUICK_SIZES = {64 * KIB: (1, 512), 2 * MIB: (32,)}
NOISE = 0.10  # between two bare copies: if they differ more, a rate says nothing
RATED_BYTES = 32 * MIB  # below this size a transfer is mostly its dialogue, and the row is in milliseconds
# 101 M parameters, three quarters of them the vocabulary's, which costs no prefill time; KV of 4 KiB per token.
SHAPE = ModelConfig(98_304, 768, 2_048, num_layers=4, num_heads=12, num_kv_heads=4, head_dim=64, max_length=4_096)
PROMPT = 2_048
NUM_PAIRS = 300
PARTS = ("payload", "hidden")
WORKER = ("--threads", "1", "--max-num-seqs", "4", "--num-blocks", "512", "--transports", "auto")


# ---- payload rate ----


def payload(report: Report, runner: asyncio.Runner, sizes: dict[int, tuple[int, ...]], num_rounds: int) -> None:
    transports = ["shm", "tcp", "grpc", *(["nixl"] if find_package() else [])]
    for block_bytes, counts in sizes.items():
        pair = Pair(runner, block_bytes, transports)
        try:
            for count in counts:
                _descriptors(report, pair, block_bytes, count)
                for transport in transports:
                    _rate(report, pair, transport, block_bytes, count, num_rounds)
        finally:
            pair.close()
    if "nixl" not in transports:
        print("nixl: not measured, not installed here")
    print("cuda_ipc: not measured" + (", no such arm yet" if find_runtime() else ", no GPU here"))


def _descriptors(report: Report, pair: Pair, block_bytes: int, count: int) -> None:
    """Measure blocks that are scattered on both sides, as in a used pool, and adjacent, as in a fresh one."""
    moved = Range(0, count * BLOCK_TOKENS, 0, pair.layout.groups[0].num_layers)
    ids = [np.array(scattered(pair.num_blocks, count, seed)) for seed in (1, 2)]
    fresh = np.arange(count)
    (box,) = pair.layout.whole
    whole = BoxOfPool(pair.layout, box)
    name = f"{_size(block_bytes)} x {count}: descriptors"
    report.add(f"{name}, scattered", len(merged_runs(whole, whole, *ids, moved)), "runs")
    report.add(f"{name}, side by side", len(merged_runs(whole, whole, fresh, fresh, moved)), "runs")


def _rate(report: Report, pair: Pair, transport: str, block_bytes: int, count: int, num_rounds: int) -> None:
    """Compare the whole fetch, from the received handle to the last verified block, with the bare copy."""
    num_bytes = count * block_bytes
    pair.fetch(transport, "sum", count)
    pair.check(count)
    bare = pair.memcpy if transport == "shm" else pair.sendall
    arms: dict[str, Callable[[], float]] = {
        "off": lambda: pair.fetch(transport, "off", count)[0],
        "sum": lambda: pair.fetch(transport, "sum", count)[0],
        "bare": lambda: bare(num_bytes),
        "bare again": lambda: bare(num_bytes),
    }
    cpu_s = dict.fromkeys(arms, 0.0)
    found = medians(interleave({arm: _counting(pair, cpu_s, arm, call) for arm, call in arms.items()}, num_rounds))
    name = f"{transport}, {_size(block_bytes)} x {count}"
    for arm in ("off", "sum"):
        mine, theirs = (1e3 * cpu_s[each] / num_rounds for each in (arm, "bare"))
        report.add(f"{name}: CPU of both processes, digests {arm}", mine, "ms", against=theirs)
    if num_bytes < RATED_BYTES:
        for arm in ("off", "sum"):
            report.add(f"{name}: digests {arm}", found[arm] * 1e3, "ms", against=found["bare"] * 1e3)
        return
    rate = {arm: num_bytes / seconds / 1e9 for arm, seconds in found.items()}
    is_void = not 1 - NOISE <= rate["bare again"] / rate["bare"] <= 1 + NOISE
    for arm, least in (("off", 0.85), ("sum", 0.70)):
        goal = f"ratio >= {least:.2f}" if transport in ("shm", "tcp") and not is_void else ""
        void = f": VOID, two bare copies differ by more than {NOISE:.0%}" if is_void else ""
        report.add(f"{name}: digests {arm}{void}", rate[arm], "GB/s", against=rate["bare"], goal=goal)
    report.add(f"{name}: A/A, bare over bare", rate["bare again"], "GB/s", against=rate["bare"])


def _counting(pair: Pair, cpu_s: dict[str, float], arm: str, call: Callable[[], float]) -> Callable[[], float]:
    """Return `call` wrapped to add the CPU time of its process and of the source to cpu_s[arm]."""

    def counted() -> float:
        before = pair.cpu_s
        took_s = call()
        cpu_s[arm] += pair.cpu_s - before
        return took_s

    return counted


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


# ---- hidden ----


class Answer(NamedTuple):
    ttft_s: float
    gap_s: float  # first token to second: the visible part of the handoff, and one step
    is_split: bool


class Client:
    def __init__(self, target: str):
        self._channel = grpc.insecure_channel(target)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def ask(self, prompt_ids: list[int]) -> Answer:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt_ids), sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(max_tokens=2, ignore_eos=True),
        )  # fmt: skip
        began, stamps, transfer_s = time.perf_counter(), [], 0.0
        for message in self._stub.Generate(request, timeout=300):
            stamps.extend([time.perf_counter()] * len(message.token_ids))
            transfer_s = max(transfer_s, message.timing.transfer_s)
        return Answer(stamps[0] - began, stamps[1] - stamps[0], transfer_s > 0)

    def close(self) -> None:
        self._channel.close()


def hidden(report: Report, folder: Path, num_pairs: int) -> None:
    model = write_random_model(folder / "model", SHAPE)
    options = {"options": WORKER, "env": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}}
    split_options = {**options, "gateway_options": ("--split", "always")}
    with (
        Stack(model, folder / "split", **split_options) as split,
        Stack(model, folder / "whole", num_prefill=0, **options) as whole,
    ):
        clients = Client(split.target), Client(whole.target)
        try:
            _compare(report, *clients, num_pairs)
        finally:
            for client in clients:
                client.close()


def _compare(report: Report, split: Client, whole: Client, num_pairs: int) -> None:
    rng = random.Random(0)
    found: dict[str, list[Answer]] = {"split": [], "whole": []}
    for index in range(-1, num_pairs + 1):
        prompt_ids = [rng.randrange(5, SHAPE.vocab_size) for _ in range(PROMPT)]
        arms = [("split", split), ("whole", whole)]
        for name, client in arms if index % 2 else reversed(arms):
            answer = client.ask(prompt_ids)
            if index >= 0:  # earlier ones warmed up
                found[name].append(answer)
    if not all(answer.is_split for answer in found["split"]):
        raise RuntimeError("a request of the split arm was not handed over")
    ttft_ms = statistics.median(answer.ttft_s for answer in found["split"]) * 1e3
    report.add(f"hidden, {PROMPT} tokens: TTFT, split over whole", ttft_ms, "ms",
               against=statistics.median(answer.ttft_s for answer in found["whole"]) * 1e3)  # fmt: skip
    digest_ms = _digest_s() * 1e3
    report.add(f"digests of {PROMPT} tokens, source and taker, over TTFT", digest_ms, "ms", against=ttft_ms,
               goal="ratio <= 0.02")  # fmt: skip
    margin_ms = 0.03 * ttft_ms + 2
    handed = _differences(found["split"], found["whole"])
    noise = _differences(found["whole"][1:], found["whole"][:-1])  # as far apart in time as the pairs
    for percent, margin in ((50, margin_ms), (99, margin_ms + 5)):
        name, found_ms = f"p{percent}", nearest_rank(handed, percent)
        floor = abs(nearest_rank(noise if percent == 50 else [abs(each) for each in noise], percent))
        report.add(f"hidden, {name}: A/A, whole minus the whole before", floor, "ms")
        row = f"hidden, {name}: first token to second, split minus whole"
        if floor > margin:
            report.add(f"{row}: VOID, the noise exceeds {margin:.1f} ms", found_ms, "ms")
        else:
            report.add(row, found_ms, "ms", goal=f"value <= {margin:.1f}")


def _digest_s() -> float:
    """Return the seconds that both sides spend on the digests of one prompt, in addition to copying it."""
    layout = KVLayout((KVGroup("paged", SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim, "bf16", BLOCK_TOKENS),))
    ids, moved = np.arange(PROMPT // BLOCK_TOKENS), Range(0, PROMPT, 0, SHAPE.num_layers)
    memory = BlockMemory(np.ones(len(ids) * layout.block_bytes, np.uint8), layout)
    cells, names, seconds = Cells(memory, layout.whole[0], 0), [bytes(32)] * (PROMPT // SPAN_TOKENS), []
    for _ in range(9):
        began = time.perf_counter()
        make_digests("sum", layout, layout.whole[0], names).of_pool(cells, ids, moved)
        seconds.append(time.perf_counter() - began)
    return 2 * statistics.median(seconds)


def _differences(ours: list[Answer], theirs: list[Answer]) -> list[float]:
    """Return the differences of the pairs in milliseconds."""
    return [(a.gap_s - b.gap_s) * 1e3 for a, b in zip(ours, theirs, strict=True)]


def main() -> int:
    arguments, report = start(
        "handoff", "KV between two workers: payload rates, and what of it a client waits for.", PARTS
    )
    quick = arguments.quick
    if "payload" in arguments.only:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as workers do
            payload(report, runner, QUICK_SIZES if quick else SIZES, 3 if quick else 9)
    if "hidden" in arguments.only:
        with tempfile.TemporaryDirectory() as name:
            hidden(report, Path(name), 2 if quick else NUM_PAIRS)
    why = ", no such arm yet" if find_runtime() else ", no GPU here"
    print(f"hidden, two processes on one GPU, CUDA IPC, 8B shape: not measured{why}")
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
