"""How near each class of kernels comes to its device's limit: python bench/kernels.py [--quick] [--out FILE].

Writes the file of efficiencies that `baton plan --efficiencies FILE` reads; baton/planning/measured/cpu.json is one.
Whole layers and the output head of two models are measured, the shipped one and one with random weights and layers ten
times as large. Steps of many short sequences give the linear layers; what a longer context adds is attention. Each is
measured with weights from memory, cycling through more copies than any cache holds, and, if they fit, with weights that
stay in the cache. CPU time counts: on one thread it is what a kernel takes on a core of its own. Costs of the host are
what an idle stack takes in addition."""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from baton.loadgen.outcome import Outcome
from baton.planning.devices import CACHES_READ, Device, this_cpu
from baton.planning.efficiency import Efficiencies, HostCosts, Point
from baton.planning.step_time import Roofs, StepTimes
from bench.lib import sending
from bench.lib.cpu_time import cpu_s
from bench.lib.paths import MODEL
from bench.lib.random_model import write_random_model
from bench.lib.report import finish, start
from kvtransfer.layout import KVLayout
from tests.support.stack import Stack

FORMS = ("none", "int8", "int4-g32")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHORT, CONTEXTS = 16, (256, 1024, 1984)
THREADS, ROUNDS = 1, 9
NOISE = 1.1  # a smaller ratio of two steps cannot be told from noise


class Layers:
    """A model of one form, its pool, and the seconds of its steps. It is loaded once, or as often as reading it from
    memory needs (`is_cached` False)."""

    def __init__(self, folder: Path, form: str, device: Device, is_cached: bool, num_rounds: int):
        spec = read_spec(folder)
        most = max(ROWS)
        config = EngineConfig(
            model=folder, quantization=form, dtype="bf16", max_num_seqs=most, max_num_batched_tokens=most + 64, num_blocks=2048,
            threads=device.threads, device=device.kind,
        )  # fmt: skip
        self.config, on = resolve(config, spec), find_device(device.kind)
        torch.set_num_threads(device.threads)
        self.roofs, self.form, self.is_cached = Roofs(spec, device, form, "bf16"), form, is_cached
        weight_bytes = self.roofs.all_layer_bytes + self.roofs.head_bytes
        num_copies = 1 if is_cached else 1 + int(CACHES_READ * device.cache_bytes / weight_bytes)
        self._models: list[Model] = [load_model(self.config, on) for _ in range(num_copies)]
        self._pool = KVPool(KVLayout((self._models[0].kv_group("bf16", 32),)), 2048, device=on)
        self._num_rounds, self._turn = num_rounds, 0

    @torch.inference_mode()
    def hidden_s(self, pieces: Sequence[tuple[int, int]]) -> float:
        batches = [_batch(pieces, self._pool.num_blocks, number) for number in range(len(self._models))]

        def step() -> float:
            turn = self._next_turn()
            return _thread_s(lambda: self._models[turn].hidden(batches[turn], self._pool))

        return self._usual_s(step)

    @torch.inference_mode()
    def head_s(self, num_rows: int) -> float:
        """Return the seconds of the output head after the layers of its step."""
        before = _batch([(1, SHORT)], self._pool.num_blocks, 0)
        rows = torch.zeros(num_rows, self.roofs.spec.hidden_size, dtype=torch.bfloat16)

        def step() -> float:
            model = self._models[self._next_turn()]
            model.hidden(before, self._pool)
            return _thread_s(lambda: model.logits(rows))

        return self._usual_s(step)

    def points(self, attends: bool) -> Iterator[Point]:
        yield from self._linear_points()
        yield from self._head_points()
        if attends:
            yield from self._attention_points()

    def _linear_points(self) -> Iterator[Point]:
        for rows in ROWS:
            best_s, _ = self.roofs.linear_s(rows, self.is_cached)
            # Few sequences, or the cost of each would count: prompts have many tokens per sequence.
            pieces = [(1, SHORT)] * rows if rows < 64 else [(32, 32)] * (rows // 32)
            yield self._point("linear", self.form, self.roofs.layer_bytes, rows, best_s / self.hidden_s(pieces))

    def _head_points(self) -> Iterator[Point]:
        for rows in ROWS[:7:2]:
            best_s = self.roofs.head_s(rows, self.is_cached)
            yield self._point("head", self.roofs.head_form, self.roofs.head_bytes, rows, best_s / self.head_s(rows))

    def _attention_points(self) -> Iterator[Point]:
        """Yield the points whose share of the step exceeds its noise. With cached weights only decoding is measured,
        since prompts are bound by compute."""
        roofs = self.roofs
        for context in CONTEXTS:
            size = context * roofs.kv_token_bytes
            for rows in (1, 4, 16):
                if self.is_cached and not roofs.is_cached(rows * context):
                    continue
                best_s = roofs.decode_attention_s(rows * (context - SHORT), self.is_cached)
                if seconds := self._more_s([(1, SHORT)] * rows, [(1, context)] * rows):
                    yield self._point("decode_attention", "*", size, rows, best_s / seconds)
            for rows in () if self.is_cached else (64, 128, 512):
                best_s = roofs.prefill_attention_s(roofs.pairs(rows, context) - roofs.pairs(rows, rows), context - rows)
                if context > rows and (seconds := self._more_s([(rows, rows)], [(rows, context)])):
                    yield self._point("prefill_attention", "*", size, rows, best_s / seconds)

    def _more_s(self, short: Sequence[tuple[int, int]], long: Sequence[tuple[int, int]]) -> float:
        """Return how much longer the long step takes; 0 if not more than the noise."""
        short_s, long_s = self.hidden_s(short), self.hidden_s(long)
        return long_s - short_s if long_s > NOISE * short_s else 0.0

    def _point(self, kind: str, form: str, size: float, rows: float, efficiency: float) -> Point:
        return Point(kind, form, size, rows, efficiency, self.is_cached)

    def _next_turn(self) -> int:
        self._turn = (self._turn + 1) % len(self._models)
        return self._turn

    def _usual_s(self, step: Callable[[], float]) -> float:
        step()
        return statistics.median(step() for _ in range(self._num_rounds))


def _thread_s(action: Callable[[], object]) -> float:
    begun = time.thread_time()
    action()
    return time.thread_time() - begun


def _batch(pieces: Sequence[tuple[int, int]], num_blocks: int, number: int) -> ForwardBatch:
    """Return a batch in which every sequence has its own blocks, others for each `number` as far as there are
    enough."""
    block_size, begin, seqs, positions, slots, rows = 32, 0, [], [], [], []
    taken = number * sum(-(-kv_len // block_size) for _, kv_len in pieces)
    for num, kv_len in pieces:
        each = -(-kv_len // block_size)
        blocks = [(taken + index) % num_blocks for index in range(each)]
        taken += each
        seqs.append(SeqSlice(begin, num, kv_len, torch.tensor(blocks)))
        for position in range(kv_len - num, kv_len):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        begin += num
        rows.append(begin - 1)
    return ForwardBatch(
        torch.ones(begin, dtype=torch.int64), torch.tensor(positions), torch.tensor(slots), seqs, torch.tensor(rows)
    )


# ---- costs outside kernels ----


class _Asked(NamedTuple):
    """Medians of one run, and the CPU seconds of gateway and client per token."""

    ttft_s: float
    tpot_s: float
    token_s: float


_PROMPT, _OUTPUT, _APART_S = 64, 96, 0.2


def host_costs(times: StepTimes, folder: Path, num_rounds: int) -> HostCosts:
    """Measure an idle stack with one and with eight concurrent requests, on one worker and split over two. `times` are
    without host costs."""
    options = ("--threads", str(THREADS))
    found: dict[tuple[str, int], _Asked] = {}
    for split, num_prefill in (("never", 0), ("always", 1)):
        run = Stack(MODEL, folder / split, num_prefill=num_prefill, options=options, gateway_options=("--split", split))
        with run as stack, asyncio.Runner() as runner:
            for concurrency in (8, 1):
                found[split, concurrency] = _asked(stack, runner, concurrency, num_rounds, times.spec.vocab_size)
    alone, many, split = found["never", 1], found["never", 8], found["always", 1]
    context = _PROMPT + _OUTPUT // 2
    over_one = alone.tpot_s - times.decode_s(1, context)
    over_many = many.tpot_s - times.decode_s(8, context)
    sequence_s = max(0.0, (over_many - over_one) / 7)
    step_s = max(0.0, over_one - sequence_s)
    request_s = max(0.0, alone.ttft_s - times.prefill_s(_PROMPT, 512) - step_s)
    handover_s = max(0.0, (split.tpot_s - alone.tpot_s) * (_OUTPUT - 1))
    split_s = max(0.0, split.ttft_s - alone.ttft_s)
    return HostCosts(step_s, sequence_s, request_s, many.token_s, handover_s, split_s)


def _asked(stack: Stack, runner: asyncio.Runner, concurrency: int, num_rounds: int, vocab_size: int) -> _Asked:
    """Ask `concurrency` requests at a time for `num_rounds` rounds after a warm-up. A single request comes some time
    after the previous one, as in reality: processes that slept take longer."""
    sender, rng = runner.run(sending.connect(stack.target)), random.Random(0)

    def ask(rounds: int) -> list[Outcome]:
        jobs = sending.draw_jobs(rng, [(_PROMPT, _OUTPUT)] * concurrency * rounds, vocab_size)
        if concurrency == 1:
            apart = [replace(job, at_s=number * _APART_S) for number, job in enumerate(jobs)]
            return runner.run(sending.arriving(sender, apart))
        return runner.run(sending.in_batches(sender, jobs, concurrency))

    ask(1)
    processes = [psutil.Process(stack.gateways[0].pid), psutil.Process()]
    before = sum(map(cpu_s, processes))
    outcomes = ask(num_rounds)
    spent_s = sum(map(cpu_s, processes)) - before
    runner.run(sender.close())
    ttft_s = statistics.median(each.ttft_s for each in outcomes)
    tpot_s = statistics.median(each.tpot_s for each in outcomes)
    return _Asked(ttft_s, tpot_s, spent_s / (_OUTPUT * len(outcomes)))


def measure(
    models: Sequence[tuple[Path, Sequence[str]]],
    folder: Path,
    num_rounds: int,
    say: Callable[[str, Point], None] = lambda model, point: None,
) -> Efficiencies:
    """Return the efficiencies of this machine for these models and forms, with the shipped model as the stack serves
    it. `folder` receives logs; each point is printed as it is measured, with model and form."""
    device, points = this_cpu(THREADS), []
    for model, forms in models:
        for form, is_cached in itertools.product(forms, (False, True)):
            if is_cached and not Roofs(read_spec(model), device, form, "bf16").is_cached(0):
                continue
            for point in Layers(model, form, device, is_cached, num_rounds).points(attends=form == forms[0]):
                say(f"{model.name}, {form}", point)
                points.append(point)
    known = Efficiencies(
        device.name, HostCosts(0, 0, 0, 0, 0, 0), points, True, THREADS, device.bytes_per_s,
        device.cache_bytes_per_s, device.flops_per_s["bf16"],
    )  # fmt: skip
    times = StepTimes(read_spec(MODEL), device, known, "none", "bf16")
    return replace(known, host=host_costs(times, folder, num_rounds))


def main() -> int:
    out = dict(type=Path, metavar="FILE", help="write the efficiencies to FILE")
    arguments, report = start("kernels", "Efficiencies of kernels, for `baton plan`.", options={"--out": out})

    def say(model: str, point: Point) -> None:
        name = f"{model}{' in the cache' if point.is_cached else ''}: {point.kind}, {point.rows:g} rows"
        name += f", {point.size / 1e3:.0f} kB of KV" if "attention" in point.kind else ""
        report.add(name, point.efficiency, "of the roofline")

    with tempfile.TemporaryDirectory() as name:
        models = [(MODEL, FORMS), (write_random_model(Path(name) / "large"), FORMS)]
        known = measure(models, Path(name), 3 if arguments.quick else ROUNDS, say)
    for what, seconds in vars(known.host).items():
        report.add(f"host: {what}", 1e6 * seconds, "us")
    if arguments.out is not None:
        arguments.out.write_text(as_file(known))
    return finish(arguments, report)


def as_file(known: Efficiencies) -> str:
    """Return the file of efficiencies, one point a line."""
    head = {
        "device": known.name, "measured": True, "threads": known.threads, "bytes_per_s": known.bytes_per_s,
        "cache_bytes_per_s": known.cache_bytes_per_s, "flops_per_s": known.flops_per_s, "host": vars(known.host),
    }  # fmt: skip
    lines = [
        json.dumps([each.kind, each.form, round(each.size), each.rows, round(each.efficiency, 4), each.is_cached])
        for each in known.points
    ]
    text = json.dumps(head, indent=1)
    return text[:-2] + ',\n "points": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"


if __name__ == "__main__":
    sys.exit(main())
