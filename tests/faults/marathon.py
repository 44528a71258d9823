"""Hours of load, bursts, cancels and faults: python -m tests.faults.marathon [--hours H] [--seed N] (make marathon).

Two prefill workers, two decode workers, a gateway and a Redis; 32 requests at once, 128 for a minute every eight; one
in ten is cancelled. Every 15 s or so something is killed, frozen, reset or rolled: the second worker of a role is
killed; the first one lives through it all, so that what grows in it is seen. Gates: every invariant, and nothing that
grows. Beside it, in a process that gives way to all others, engines answer random plans (tests/fuzz); afterwards a
stack does.
"""

import argparse
import asyncio
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import grpc

from tests.faults import record
from tests.support.faults.checker import Counters, check_privacy
from tests.support.faults.history import percentile
from tests.support.faults.load import Load
from tests.support.faults.reference import Reference
from tests.support.faults.samples import WARM_S, Samples
from tests.support.faults.world import World
from tests.support.models import make_model
from tests.support.process import ROOT

NUM_CLIENTS, NUM_IN_BURST = 32, 128
NUM_BLOCKS = 160  # of each worker
BURST_S, BURST_EVERY_S = 60.0, 480.0
SAMPLE_S, PROBE_S = 5.0, 1.0
STEP = "engine.step=sleep:0.01"  # streams that last long enough to be hit
STACK_SHARE = 0.25  # of the time, once more, for random plans on a stack
# Of the processes' own pages: what it is called here, the line there, and its unit.
_FIGURES = (
    ("tasks", "baton_tasks{.*}", 1),
    ("used MiB", 'baton_heap_bytes{.*state="used"}', 1 << 20),
    ("python blocks", "baton_python_blocks{.*}", 1),
)
FREEZE_S = 7.0  # longer than it takes to move its streams


class Nemesis:
    """One fault at a time, drawn from a seed; afterwards everything runs again."""

    def __init__(self, world: World, load: Load, seed: int):
        self.done: Counter[str] = Counter()
        self._world, self._load, self._random = world, load, random.Random(seed)

    async def run(self, ends_at: float) -> None:
        while time.monotonic() + 20 < ends_at:
            await asyncio.sleep(self._random.uniform(3, 12))
            await self.strike(self._random.choice(("kill", "kill", "kill", "freeze", "reset", "roll", "redis")))

    async def strike(self, kind: str) -> None:
        self.done[kind] += 1
        await getattr(self, f"_{kind}")()
        await self._world.aside(self._world.settled)
        for process in self._world.stack.workers:
            process.arm(STEP)

    async def _kill(self) -> None:
        process = self._random.choice((self._world.stack.prefill, self._world.stack.decode))[1]
        self._load.hit()
        process.kill()
        await asyncio.sleep(self._random.uniform(0, 2))
        await self._world.aside(self._world.restart, process)

    async def _freeze(self) -> None:
        process = self._random.choice(self._world.stack.workers)
        self._load.hit()
        process.freeze()
        await asyncio.sleep(self._random.choice((0.5, FREEZE_S)))
        process.thaw()

    async def _reset(self) -> None:
        self._load.hit()
        self._world.stack.proxy(self._random.choice(self._world.stack.workers)).reset()

    async def _roll(self) -> None:
        process = self._random.choice((self._world.stack.prefill, self._world.stack.decode))[1]
        process.terminate()
        await self._world.aside(process.wait, 60)
        process.killed = True
        await self._world.aside(self._world.restart, process)

    async def _redis(self) -> None:
        redis = self._world.redis
        if self._random.random() < 0.5:
            redis.freeze()
            await asyncio.sleep(2)
            redis.thaw()
        else:
            redis.kill()
            await asyncio.sleep(1)
            await self._world.aside(redis.start)


async def run(world: World, seconds: float, seed: int) -> tuple[Load, Nemesis, Samples, list[str]]:
    """The whole of it; what was broken, in words."""
    # Redis is killed every few minutes, and is empty then: how its keys grow says nothing.
    samples, before = Samples({"redis keys": NUM_BLOCKS * len(world.stack.workers)}), world.counters()
    async with grpc.aio.insecure_channel(world.stack.proxy(world.gateway).address) as channel:
        load = Load(world, channel, seed)
        nemesis = Nemesis(world, load, seed)
        for process in world.stack.workers:
            process.arm(STEP)
        ends_at = time.monotonic() + seconds
        tasks = [
            asyncio.create_task(work)
            for work in (
                nemesis.run(ends_at),
                _bursts(load, ends_at, seconds),
                _probes(load, ends_at),
                _sample(world, samples, ends_at),
            )
        ]
        await asyncio.gather(*tasks)
        await load.stop()
        for process in world.stack.processes:
            process.arm("")
        faults = await world.aside(world.heal) + load.faults
        for _ in range(5):
            ask = await load.probe()
            faults += [f"I-8 a request afterwards: {ask.words()}"] if ask.status != "OK" else []
    faults += await world.aside(world.ledgers)
    faults += [f"I-6 {line}" for line in world.stack.complaints()]
    faults += check_privacy(world.pages()) + _uncounted(before, world.counters(), load) + samples.missed_gates()
    return load, nemesis, samples, faults


def _uncounted(before: Counters, after: Counters, load: Load) -> list[str]:
    """The gateway lived through it: it has counted every request that was answered."""
    counted, seen = after.outcomes - before.outcomes, load.statuses
    num_cancelled = seen["CANCELLED"]
    if not seen["OK"] <= counted["ok"] <= seen["OK"] + num_cancelled:
        return [f"I-7 {counted['ok']} requests ok by the gateway's count, {seen['OK']} by the clients'"]
    return []


async def _bursts(load: Load, ends_at: float, seconds: float) -> None:
    every = min(BURST_EVERY_S, seconds / 2)
    burst = min(BURST_S, every / 4)
    while (left := ends_at - time.monotonic()) > 0:
        load.scale(NUM_CLIENTS)
        await asyncio.sleep(max(0.0, min(every - burst, left)))
        if ends_at - time.monotonic() > burst:
            load.scale(NUM_IN_BURST)
            await asyncio.sleep(burst)


async def _probes(load: Load, ends_at: float) -> None:
    while time.monotonic() < ends_at:
        await load.probe()
        await asyncio.sleep(PROBE_S)


async def _sample(world: World, samples: Samples, ends_at: float) -> None:
    while time.monotonic() < ends_at:
        samples.take(world.stack.processes, **await world.aside(_others, world))
        await asyncio.sleep(SAMPLE_S)


def _others(world: World) -> dict[str, float]:
    """Return the processes' own figures, as far as they answer now."""
    keys = _num_keys(world)
    found = {} if keys is None else {"redis keys": keys}
    for process in world.stack.processes:
        try:
            page = urlopen(f"http://{process.ready()['admin']}/metrics", timeout=1).read().decode()
        except (OSError, RuntimeError):  # dead, frozen, or about to begin
            continue
        for what, pattern, unit in _FIGURES:
            if value := re.search(rf"^{pattern} (\S+)$", page, re.MULTILINE):
                found[f"{process.name} {process.pid} {what}"] = float(value[1]) / unit
    return found


def _num_keys(world: World) -> int | None:
    try:
        return world.redis.client.dbsize()
    except OSError:
        return None
    except Exception as error:  # redis-py's own, while it is dead or frozen
        if type(error).__module__.startswith("redis"):
            return None
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.marathon", description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments = parser.parse_args()
    seconds = 3600 * arguments.hours
    print(f"marathon of {seconds:.0f} s, seed {arguments.seed}", flush=True)
    with _fuzzing("world", arguments.seed, seconds) as engines:
        num_faults = _marathon(arguments.seed, seconds)
        num_different = engines.wait()
    with _fuzzing("stack", arguments.seed, STACK_SHARE * seconds) as stacks:
        num_different += stacks.wait()
    return 1 if num_faults or num_different else 0


def _marathon(seed: int, seconds: float) -> int:
    """Return how much was broken; printed, and appended to the results."""
    folder = Path(tempfile.mkdtemp(prefix="marathon-"))
    model = make_model(folder / "tiny")
    options = ("--num-blocks", str(NUM_BLOCKS), "--threads", "1", "--lease-ttl-s", "2")
    with World(model, folder / "stack", Reference(model), redis=True, seed=seed, options=options) as world:
        load, nemesis, samples, faults = asyncio.run(run(world, seconds, seed))
    values = {
        "seconds": round(seconds), "requests": sum(load.statuses.values()), "statuses": dict(load.statuses),
        "tokens": load.num_tokens, "kills": nemesis.done["kill"], "freezes": nemesis.done["freeze"],
        "resets": nemesis.done["reset"], "worker_rolls": nemesis.done["roll"], "redis_faults": nemesis.done["redis"],
        "streams_hit": load.num_hit, "streams_exact": load.num_exact, "failed": load.num_failed,
        "wrong": load.num_wrong,
        "gap_p50_s": round(percentile(load.gaps, 50), 3), "gap_p99_s": round(percentile(load.gaps, 99), 3),
        "violations": len(faults),
        "slopes_per_hour": {name: round(value, 2) for name, value in samples.slopes().items()},
        "slopes_per_hour_of_last_half": {
            name: round(value, 2) for name, value in samples.slopes(last=0.5).items() if name.endswith("MiB")
        },
    }  # fmt: skip
    for name, value in values.items():
        print(f"{name:16} {value}")
    if seconds < 2 * WARM_S:
        print(f"growth was not judged: that takes {2 * WARM_S / 3600:.2g} hours")
    for words, count in Counter(fault.partition(": ")[2] or fault for fault in faults).most_common(40):
        print(f"{count} x {words}")
    if faults:
        samples.save(folder / "samples.json")
        print("logs and samples are kept in", folder)
    else:
        print("every gate passed")
        shutil.rmtree(folder)
    print("appended to", record.append("marathon", seed, **values))
    return len(faults)


@contextmanager
def _fuzzing(what: str, seed: int, seconds: float) -> Iterator[subprocess.Popen]:
    """A process that leaves a line of its own in the results, and gives way to all others: also to those of other
    sessions, between which the kernel shares the cores whatever the niceness of a process (autogroups)."""
    argv = [sys.executable, "-m", "tests.faults.gather", what, str(1 << 40), "--seed", str(seed)]
    process = subprocess.Popen(["nice", "-n", "19", *argv, "--seconds", str(seconds)], cwd=ROOT, start_new_session=True)
    autogroup = Path(f"/proc/{process.pid}/autogroup")
    if autogroup.exists():
        autogroup.write_text("19")
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
