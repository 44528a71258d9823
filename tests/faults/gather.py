"""Figures that take many runs: python -m tests.faults.gather kills|rolls|digests|fuzz COUNT [--seed N].

Each run leaves a line in bench/results/; make fault-report adds them up."""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import grpc

from tests.faults import fuzz, record
from tests.faults.history import percentile
from tests.faults.load import Load
from tests.faults.reference import Reference
from tests.faults.world import Case, World
from tests.models import make_model
from tests.stack import SLOW_STEPS

NUM_STREAMS, MAX_TOKENS = 6, 60
STEP = "engine.step=sleep:0.005"
SPAN_TOKENS, CELLS_PER_SPAN = 64, 8  # of the model that is used: 2 layers, k and v, 2 heads
DIGEST_PROMPT = 900


async def kills(world: World, count: int, seed: int) -> dict:
    """One worker after the other, of either role, at a moment that is drawn."""
    draw, gaps, values = random.Random(seed), [], Counter()
    for number in range(count):
        async with world.case(f"kill {number}", "answered to the end, token for token") as c:
            with c.slow(STEP):
                asks = c.ask_many(NUM_STREAMS, draw.choice((60, 130, 300)), MAX_TOKENS)
                await asks[0].got(draw.randrange(MAX_TOKENS - 10)) if draw.random() < 0.7 else await asyncio.sleep(
                    draw.uniform(0, 0.2)
                )
                draw.choice(world.stack.workers).kill()
                await _all(c)
        values.update(_judged(asks, c.outcome))
        values["kills"] += 1
        gaps += [ask.gap_s for ask in asks]
        if c.outcome != "kept":
            print(f"kill {number}: {c.outcome}", flush=True)
    return dict(values) | {"gap_p50_s": round(percentile(gaps, 50), 3), "gap_p99_s": round(percentile(gaps, 99), 3)}


async def _all(c: Case) -> None:
    """What is broken is counted here, and does not end the run."""
    try:
        await c.check()
    except AssertionError as error:
        c.outcome = c.outcome if c.outcome != "not finished" else str(error)


def _judged(asks, outcome: str) -> Counter:
    num_ok = sum(ask.status == "OK" for ask in asks)
    return Counter(
        requests=len(asks), streams_hit=len(asks), streams_exact=num_ok if "I-2" not in outcome else 0,
        failed=len(asks) - num_ok, wrong="I-2" in outcome, violations=outcome != "kept",
    )  # fmt: skip


async def rolls(world: World, count: int, seed: int) -> dict:
    """Every worker in turn, under load: SIGTERM, gone by itself, started again."""
    values = Counter()
    async with grpc.aio.insecure_channel(world.stack.proxy(world.gateway).address) as channel:
        load = Load(world, channel, seed, max_tokens=20)
        for process in world.stack.workers:
            process.arm(SLOW_STEPS)  # so that starting takes the processor, and not the load
        load.scale(8)
        for _ in range(count):
            for process in list(world.stack.workers):
                process.terminate()
                status = await world.aside(process.wait, 60)
                values["violations"] += status != 0
                process.killed = True
                (await world.aside(world.restart, process)).arm(SLOW_STEPS)
                await world.aside(world.settled)
            values["rolls"] += 1
        await load.stop()
    return dict(values) | {
        "requests": sum(load.statuses.values()), "rolls_failed": load.num_failed, "wrong": load.num_wrong,
        "violations": values["violations"] + len(load.faults),
    }  # fmt: skip


async def digests(world: World, count: int, seed: int) -> dict:
    """Healthy transfers until so many digests were compared."""
    before, num_digests, draw = world.counters(), 0, random.Random(seed)
    async with world.case("digests", "no false alarm") as c:
        while num_digests < count:
            asks = [c.ask([5 + draw.randrange(1000) for _ in range(DIGEST_PROMPT)], 1) for _ in range(8)]
            await c.ended()
            num_digests += len(asks) * -(-DIGEST_PROMPT // SPAN_TOKENS) * CELLS_PER_SPAN
            assert all(ask.status == "OK" for ask in asks), asks[0].words()
            c.history.asks.clear()
        alarms = int(world.counters().num_migrations - before.num_migrations)
        c.gateway_is_lost = True  # the history is forgotten as it goes
    return {
        "digests": num_digests,
        "false_alarms": alarms,
        "requests": num_digests // (-(-DIGEST_PROMPT // SPAN_TOKENS) * CELLS_PER_SPAN),
    }


async def _in_world(work, count: int, seed: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        model = make_model(Path(folder) / "tiny")
        with World(model, Path(folder) / "stack", Reference(model)) as world:
            return await work(world, count, seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.gather", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("kills", "rolls", "digests", "fuzz"))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    print(f"{arguments.what} {arguments.count}, seed {arguments.seed}", flush=True)
    if arguments.what == "fuzz":
        values = fuzz.run(arguments.count, arguments.seed)
    else:
        work = {"kills": kills, "rolls": rolls, "digests": digests}[arguments.what]
        values = asyncio.run(_in_world(work, arguments.count, arguments.seed))
    print(values)
    print("appended to", record.append(arguments.what, arguments.seed, **values))
    return (
        1
        if any(
            values.get(name)
            for name in ("failed", "rolls_failed", "wrong", "violations", "false_alarms", "fuzz_crashes")
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
