"""Figures that take many runs.

python -m tests.faults.gather kills|rolls|digests|nemesis|fuzz|world|stack|builds COUNT [--seed N] [--seconds S]
[--other CHECKOUT]

Each run leaves a line in bench/results/; make fault-report adds them up."""

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import torch

from tests.faults import damaged_inputs, marathon, record
from tests.support.faults.checker import check_history
from tests.support.faults.history import Ask, percentile
from tests.support.faults.load import Load
from tests.support.faults.reference import Reference
from tests.support.faults.world import Case, World
from tests.support.fork_server.processes import ForkServerStack
from tests.support.fuzz import fuzzers
from tests.support.fuzz.builds import MixedStacks, builds_plan
from tests.support.fuzz.fuzzer import Fuzzer, words
from tests.support.fuzz.fuzzer import fuzz as run_fuzzer
from tests.support.fuzz.stacks import Stacks, stack_plan
from tests.support.models import make_model
from tests.support.process import Process
from tests.support.stack import SLOW_STEPS

NUM_STREAMS, MAX_TOKENS = 6, 60
KILLS_A_CHECK = 5
NEMESIS_S = 60.0
TURN_REQUESTS, MAX_TURNS = 1000, 1 << 20  # of toy and real engines in turn
STACK_TRIES = 12  # to make a plan small, a minute each
STEP = "engine.step=sleep:0.005"
SPAN_TOKENS, CELLS_PER_SPAN = 64, 8  # of the model that is used: 2 layers, k and v, 2 heads
DIGEST_PROMPT, NUM_TRANSFERS = 900, 8
DIGESTS_A_TRANSFER = -(-DIGEST_PROMPT // SPAN_TOKENS) * CELLS_PER_SPAN


async def kills(world: World, count: int, seed: int, ends_at: float) -> dict:
    """One worker after the other, of either role, at a moment that is drawn; all invariants after every few."""
    draw, gaps, values = random.Random(seed), [], Counter()
    for first in _turns(count, ends_at, KILLS_A_CHECK):
        deaths = []
        try:
            async with world.case(f"kills from {first}", "answered to the end, token for token") as c:
                for _ in range(min(KILLS_A_CHECK, count - first)):
                    deaths += await _kill_one(c, draw)
                    values["kills"] += 1
        except AssertionError as error:  # counted, and the run continues
            print(f"kills from {first}: {error}", flush=True)
        asks = [ask for ask in c.history.asks if not isinstance(ask.prompt, str)]  # probes are texts
        values.update(_judged(world, asks), violations=len(deaths) + (c.outcome != "kept"))
        gaps += [ask.gap_s for ask in asks]
    gap_p50_s, gap_p99_s = (round(percentile(gaps, percent), 3) for percent in (50, 99))
    return {**values, "gap_p50_s": gap_p50_s, "gap_p99_s": gap_p99_s}


async def _kill_one(c: Case, draw: random.Random) -> list[str]:
    """Return deaths that were not ordered."""
    with c.slow(STEP):
        asks = c.ask_many(NUM_STREAMS, draw.choice((60, 130, 300)), MAX_TOKENS)
        if draw.random() < 0.7:
            await asks[0].got(draw.randrange(MAX_TOKENS - 10))
        else:
            await asyncio.sleep(draw.uniform(0, 0.2))
        draw.choice(c.stack.workers).kill()
        await c.ended()
    deaths = await c.world.aside(c.world.heal)
    await c.world.aside(c.world.settled)
    return deaths


def _judged(world: World, asks: list[Ask]) -> Counter:
    faults = [check_history([ask], world.reference, ("OK",)) for ask in asks]
    return Counter(
        requests=len(asks), streams_hit=len(asks), streams_exact=sum(not found for found in faults),
        failed=sum(ask.status != "OK" for ask in asks),
        wrong=sum(any("I-1" in fault or "I-2" in fault for fault in found) for found in faults),
    )  # fmt: skip


async def rolls(world: World, count: int, seed: int, ends_at: float) -> dict:
    """Under load the workers of each role in turn, both roles at once: SIGTERM, gone by itself, started again."""
    values = Counter()
    async with grpc.aio.insecure_channel(world.stack.proxy(world.gateway).address) as channel:
        load = Load(world, channel, seed, max_tokens=20)
        for process in world.stack.workers:
            process.arm(SLOW_STEPS)  # so that starting takes the processor, and not the load
        load.scale(8)
        for _ in _turns(count, ends_at):
            for pair in list(zip(world.stack.prefill, world.stack.decode, strict=True)):
                statuses = await asyncio.gather(*(world.aside(_roll, world, process) for process in pair))
                values["violations"] += sum(status != 0 for status in statuses)
                await world.aside(world.settled)
            values["rolls"] += 1
        await load.stop()
    return dict(values) | {
        "requests": sum(load.statuses.values()), "rolls_failed": load.num_failed, "wrong": load.num_wrong,
        "violations": values["violations"] + len(load.faults),
    }  # fmt: skip


def _roll(world: World, process: Process) -> int:
    """Its exit status."""
    process.terminate()
    status = process.wait(60)
    process.killed = True
    world.restart(process).arm(SLOW_STEPS)
    return status


async def digests(world: World, count: int, seed: int, ends_at: float) -> dict:
    """Run healthy transfers until that many digests were compared."""
    before, num_digests, draw = world.counters(), 0, random.Random(seed)
    async with world.case("digests", "no false alarm") as c:
        for _ in _turns(-(-count // (NUM_TRANSFERS * DIGESTS_A_TRANSFER)), ends_at):
            asks = [c.ask([5 + draw.randrange(1000) for _ in range(DIGEST_PROMPT)], 1)
                    for _ in range(NUM_TRANSFERS)]  # fmt: skip
            await c.ended()
            num_digests += NUM_TRANSFERS * DIGESTS_A_TRANSFER
            assert all(ask.status == "OK" for ask in asks), asks[0].words()
            c.history.asks.clear()
        alarms = int(world.counters().num_migrations - before.num_migrations)
        c.gateway_is_lost = True  # the history is forgotten as it goes
    return {"digests": num_digests, "false_alarms": alarms, "requests": num_digests // DIGESTS_A_TRANSFER}


async def nemesis(world: World, count: int, seed: int, ends_at: float) -> dict:
    """Minutes of everything that marathon.py does, each from a seed of its own; the first that breaks something is the
    last."""
    values = Counter()
    for turn in _turns(count, ends_at - NEMESIS_S):
        number = seed + turn
        load, struck, _, faults = await marathon.run(world, NEMESIS_S, number)
        values.update(
            minutes=1, requests=sum(load.statuses.values()), kills=struck.done["kill"], freezes=struck.done["freeze"],
            streams_hit=load.num_hit, streams_exact=load.num_exact, failed=load.num_failed, wrong=load.num_wrong,
            violations=len(faults),
        )  # fmt: skip
        if faults:
            print(f"seed {number}:", *faults, sep="\n", flush=True)
            break
    return dict(values)


def two_engines(count: int, seed: int, ends_at: float) -> dict:
    """Requests between two engines, one in fifty of them over a real model; the first difference ends it."""
    values: Counter[str] = Counter()
    for number in _turns(count, ends_at, TURN_REQUESTS):
        for name, share in (("toy", 0.98), ("real", 0.02)):
            wanted, turn = round(share * TURN_REQUESTS), seed * MAX_TURNS + number // TURN_REQUESTS
            counts, found = run_fuzzer(fuzzers.ALL[name], wanted, turn, ends_at)
            values.update(engine_requests=counts["requests"], worlds=counts["worlds"])
            if found:
                print(words(found), flush=True)
                return {**values, "differences": 1}
    return {**values, "differences": 0}


def stacks(count: int, seed: int, ends_at: float, other: Path | None = None) -> dict:
    """Requests of one stack after the other plan, with a fault in some forty; the first difference ends it. `other`: a
    checkout that half of the processes run."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    parts = make_model(folder / "tiny"), folder / "stack"
    with Stacks(*parts) if other is None else MixedStacks(*parts, other) as running:
        fuzzer = Fuzzer("stack", stack_plan if other is None else builds_plan, running.obey)
        counts, found = run_fuzzer(fuzzer, count, seed, ends_at, max_tries=STACK_TRIES)
    if found:
        print(words(found), "logs are kept in", folder, sep="\n", flush=True)
    else:
        shutil.rmtree(folder)
    statuses = {name: count for name, count in counts.items() if name.isupper()}
    beside = {} if other is None else {"other": _commit(other)}
    return {"stack_requests": counts["requests"], "stack_faults": counts["faults"],
            "differences": counts["differences"], "statuses": statuses, **beside}  # fmt: skip


def _commit(checkout: Path) -> str:
    argv = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


_WORKS = {"kills": kills, "rolls": rolls, "digests": digests, "nemesis": nemesis}


def _turns(count: int, ends_at: float, step: int = 1) -> Iterator[int]:
    """As long as there is time."""
    for number in range(0, count, step):
        if time.monotonic() > ends_at:
            return
        yield number


async def _in_world(work, count: int, seed: int, ends_at: float) -> dict:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    model = make_model(folder / "tiny")
    options = {"stack_class": ForkServerStack, "seed": seed} | ({"redis": True} if work is nemesis else {})
    with World(model, folder / "stack", Reference(model), **options) as world:
        values = await work(world, count, seed, ends_at)
    if _is_broken(values):
        print("logs are kept in", folder)
    else:
        shutil.rmtree(folder)
    return values


def _is_broken(values: dict) -> bool:
    broken = ("failed", "rolls_failed", "wrong", "violations", "false_alarms", "fuzz_crashes", "differences")
    return any(values.get(name) for name in broken)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.gather", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=(*_WORKS, "fuzz", "world", "stack", "builds"))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="nothing more is begun after these")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="of builds: of another commit")
    arguments = parser.parse_args()
    if (arguments.what == "builds") != (arguments.other is not None):
        parser.error("builds needs --other, and nothing else has it")
    ends_at = time.monotonic() + arguments.seconds
    print(f"{arguments.what} {arguments.count}, seed {arguments.seed}", flush=True)
    if arguments.what == "fuzz":
        values = damaged_inputs.run(arguments.count, arguments.seed)
    elif arguments.what in ("world", "stack", "builds"):
        torch.set_num_threads(1)
        work = two_engines if arguments.what == "world" else partial(stacks, other=arguments.other)
        values = work(arguments.count, arguments.seed, ends_at)
    else:
        values = asyncio.run(_in_world(_WORKS[arguments.what], arguments.count, arguments.seed, ends_at))
    print(values)
    print("appended to", record.append(arguments.what, arguments.seed, **values))
    return 1 if _is_broken(values) else 0


if __name__ == "__main__":
    sys.exit(main())
