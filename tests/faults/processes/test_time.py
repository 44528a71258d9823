"""J1: clocks that jump. Leases and deadlines count on monotonic time, each process on its own. J5: a minute of random
faults; many of them: python -m tests.faults.gather nemesis COUNT."""

import asyncio
import json
import os
import signal

import pytest

from tests.faults import marathon
from tests.support.faults.world import ProxiedStack


class JumpingStack(ProxiedStack):
    """Every process runs under tests/support/faults/jumping.py."""

    launcher = ("-m", "tests.support.faults.jumping")


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=["an hour on", "an hour back"])
async def test_the_wall_clock_jumps(case, make_world, number):
    with make_world("jumping", stack_class=JumpingStack) as world:
        async with case(f"J1 {number.name}", "nothing expires, nothing ends", world=world) as c:
            with c.slow():
                asks = c.ask_many(4, 200, max_tokens=60)
                await asyncio.gather(*(ask.got(5) for ask in asks))
                for process in c.stack.processes:
                    os.kill(process.pid, number)
                late = c.ask_many(2, 200, max_tokens=10)
                await c.ended(*asks, *late)
            assert c.world.counters().num_migrations == c._before.num_migrations


@pytest.mark.faults
async def test_the_clock_of_leases_is_off(case):
    """An hour on, on one prefill worker: its leases end at once, and another worker reads the prompt."""
    async with case("J1 lease clock", "answered through the other worker") as c:
        c.stack.prefill[0].arm("lease.clock=skew:3600@40")
        await c.ended(*c.ask_many(8, 200, max_tokens=10))


@pytest.mark.faults
@pytest.mark.parametrize("seed", [11, 12])
async def test_a_minute_of_random_faults(make_world, seed, record_property):
    """The same seed draws the same faults; every answer is judged as it ends."""
    with make_world("nemesis", redis=True) as world:
        load, nemesis, _, faults = await marathon.run(world, 60.0, seed)
    row = {"case": f"J5 seed {seed}", "promise": "all invariants", "outcome": "kept" if not faults else faults[0]}
    record_property("fault case", json.dumps(row | {"requests": load.statuses, **nemesis.done}))
    assert not faults, "\n".join(faults)
    assert nemesis.done and load.num_tokens
