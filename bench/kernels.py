"""How near each class of kernels comes to what its device could do: python bench/kernels.py [--quick] [--out FILE].

Writes the file of efficiencies that `baton plan --efficiencies FILE` reads; baton/planning/measured/cpu.json is one. Measured
are whole layers and the head of two models, the shipped one and one of random weights with layers ten times as large: steps of
many short sequences are linear layers, what a longer context adds is attention. Costs of the host are what an idle stack
takes beyond that.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig, resolve
from baton.engine.core.device import find_device
from baton.engine.kv.pool import KVPool
from baton.engine.models.decoder import Model
from baton.engine.models.loader import load_model
from baton.engine.models.registry import read_spec
from baton.planning.devices import Device, this_cpu
from baton.planning.efficiency import Efficiencies, HostCosts, Point
from baton.planning.step_time import Roofs, StepTimes
from bench.lib import sending
from bench.lib.large_model import write_large
from bench.lib.limits import best_seconds
from bench.lib.report import Report, finish, start
from kvtransfer.layout import KVLayout
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "demo" / "target"
FORMS = ("none", "int8", "int4-g32")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHORT, CONTEXTS = 16, (256, 1024, 1984)
THREADS = 1
NOISE = 1.1  # a step that takes less of another's time cannot be told from it


class Layers:
    """One loaded model of one form and a pool, and the seconds of its steps."""

    def __init__(self, folder: Path, form: str, device: Device, num_rounds: int):
        spec = read_spec(folder)
        most = max(ROWS)
        config = EngineConfig(
            model=folder, quantization=form, dtype="bf16", max_num_seqs=most, max_num_batched_tokens=most + 64, num_blocks=2048,
            threads=device.threads, device=device.kind,
        )  # fmt: skip
        self.config, on = resolve(config, spec), find_device(device.kind)
        torch.set_num_threads(device.threads)
        self.model: Model = load_model(self.config, on)
        self.roofs, self.form, self._num_rounds = Roofs(spec, device, form, "bf16"), form, num_rounds
        self._pool = KVPool(KVLayout((self.model.kv_group("bf16", 32),)), 2048, device=on)

    @torch.inference_mode()
    def hidden_s(self, pieces: Sequence[tuple[int, int]]) -> float:
        batch = _batch(pieces, self._pool.num_blocks)
        return best_seconds(lambda: self.model.hidden(batch, self._pool), self._num_rounds)

    @torch.inference_mode()
    def head_s(self, num_rows: int) -> float:
        rows = torch.zeros(num_rows, self.model.spec.hidden_size, dtype=torch.bfloat16)
        return best_seconds(lambda: self.model.logits(rows), self._num_rounds)

    def linear_points(self) -> Iterator[Point]:
        for rows in ROWS:
            best_s, _ = self.roofs.linear_s(rows)
            # Few sequences, or what each costs by itself would count: prompts that are read have many tokens of one.
            pieces = [(1, SHORT)] * rows if rows < 64 else [(32, 32)] * (rows // 32)
            yield Point("linear", self.form, self.roofs.layer_bytes, rows, best_s / self.hidden_s(pieces))

    def head_points(self) -> Iterator[Point]:
        for rows in ROWS[:7:2]:
            best_s = self.roofs.head_s(rows)
            yield Point("head", self.roofs.head_form, self.roofs.head_bytes, rows, best_s / self.head_s(rows))

    def attention_points(self) -> Iterator[Point]:
        """Those whose part of the step is larger than its noise."""
        roofs = self.roofs
        for context in CONTEXTS:
            size = context * roofs.kv_token_bytes
            for rows in (1, 4, 16):
                best_s = roofs.decode_attention_s(rows * (context - SHORT))
                if seconds := self._more_s([(1, SHORT)] * rows, [(1, context)] * rows):
                    yield Point("decode_attention", "*", size, rows, best_s / seconds)
            for rows in (64, 128, 512):
                best_s = roofs.prefill_attention_s(roofs.pairs(rows, context) - roofs.pairs(rows, rows), context - rows)
                if context > rows and (seconds := self._more_s([(rows, rows)], [(rows, context)])):
                    yield Point("prefill_attention", "*", size, rows, best_s / seconds)

    def _more_s(self, short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]]) -> float:
        """Return by how much one step takes longer than the other; 0: not by more than the noise."""
        short_s, long_s = self.hidden_s(short), self.hidden_s(long)
        return long_s - short_s if long_s > NOISE * short_s else 0.0


def _batch(pieces: Sequence[tuple[int, int]], num_blocks: int) -> ForwardBatch:
    """Every sequence has blocks of its own, as far as there are enough."""
    block_size, begin, seqs, positions, slots, rows = 32, 0, [], [], [], []
    for number, (num, kv_len) in enumerate(pieces):
        each = -(-kv_len // block_size)
        blocks = [(number * each + index) % num_blocks for index in range(each)]
        seqs.append(SeqSlice(begin, num, kv_len, torch.tensor(blocks)))
        for position in range(kv_len - num, kv_len):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        begin += num
        rows.append(begin - 1)
    return ForwardBatch(
        torch.ones(begin, dtype=torch.int64), torch.tensor(positions), torch.tensor(slots), seqs, torch.tensor(rows)
    )


# ---- what is not kernels ----


def host_costs(times: StepTimes, folder: Path, num_rounds: int) -> HostCosts:
    """Ask an idle stack, alone and with eight streams, on one worker and split over two."""
    with Stack(MODEL, folder, options=("--threads", str(THREADS)), gateway_options=("--split", "never")) as stack:
        with asyncio.Runner() as runner:
            return _host_costs(times, stack, runner, num_rounds)


def _host_costs(times: StepTimes, stack: Stack, runner: asyncio.Runner, num_rounds: int) -> HostCosts:
    sender, rng = runner.run(sending.connect(stack.target)), random.Random(0)
    prompt, output = 64, 96

    def ask(concurrency: int) -> tuple[float, float]:
        """Return the medians of TTFT and TPOT."""
        jobs = sending.draw_jobs(rng, [(prompt, output)] * concurrency * num_rounds, times.spec.vocab_size)
        outcomes = runner.run(sending.closed(sender, jobs, concurrency))
        ttfts, tpots = sorted(each.ttft_s for each in outcomes), sorted(each.tpot_s for each in outcomes)
        return ttfts[len(ttfts) // 2], tpots[len(tpots) // 2]

    ask(8)
    processes = [psutil.Process(stack.gateways[0].pid), psutil.Process()]
    ttft_s, alone_s = ask(1)
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    _, many_s = ask(8)
    token_s = (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / (8 * num_rounds * output)
    runner.run(sender.close())
    context, bare = prompt + output // 2, _without_host(times)
    over_one, over_many = alone_s - bare.decode_s(1, context), many_s - bare.decode_s(8, context)
    sequence_s = max(0.0, (over_many - over_one) / 7)
    step_s = max(0.0, over_one - sequence_s)
    request_s = max(0.0, ttft_s - bare.prefill_s(prompt, 512) - step_s)
    return HostCosts(step_s, sequence_s, request_s, token_s, handover_s=0.004)


def _without_host(times: StepTimes) -> StepTimes:
    known = times.efficiencies
    bare = Efficiencies(known.name, HostCosts(0, 0, 0, 0, 0), known.points, True)
    return StepTimes(times.spec, times.device, bare, times.form, "bf16")


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out", type=Path)
    chosen, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    arguments, report = start("kernels", "Efficiencies of kernels, for `baton plan`; --out FILE writes them.")
    device = this_cpu(THREADS)
    num_rounds = 3 if arguments.quick else 15
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as name:
        folders = {"shipped": MODEL, "large": write_large(Path(name) / "large")}
        for shape, folder in folders.items():
            for form in FORMS:
                points += _measured(report, Layers(folder, form, device, num_rounds), shape)
        times = StepTimes(
            read_spec(MODEL), device, Efficiencies("", HostCosts(0, 0, 0, 0, 0), points, True), "none", "bf16"
        )
        host = host_costs(times, Path(name) / "stack", 3 if arguments.quick else 12)
    for what, seconds in vars(host).items():
        report.add(f"host: {what}", 1e6 * seconds, "us")
    if chosen.out is not None:
        chosen.out.write_text(as_file(device, points, host))
    return finish(arguments, report)


def _measured(report: Report, layers: Layers, shape: str) -> list[Point]:
    found = [*layers.linear_points(), *layers.head_points()]
    if layers.form == "none":
        found += layers.attention_points()
    for point in found:
        name = f"{shape}, {layers.form}: {point.kind}, {point.rows:g} rows"
        name += f", {point.size / 1e3:.0f} kB of KV" if "attention" in point.kind else ""
        report.add(name, point.efficiency, "of the roofline")
    return found


def as_file(device: Device, points: Sequence[Point], host: HostCosts) -> str:
    """Return the file of efficiencies, a point a line."""
    head = {
        "device": device.name, "measured": True, "threads": device.threads, "bytes_per_s": device.bytes_per_s,
        "flops_per_s": device.flops_per_s["bf16"], "host": vars(host),
    }  # fmt: skip
    lines = [
        json.dumps([each.kind, each.form, round(each.size), each.rows, round(each.efficiency, 4)]) for each in points
    ]
    text = json.dumps(head, indent=1)
    return text[:-2] + ',\n "points": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())
