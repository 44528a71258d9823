"""J1: clocks that jump. Leases and deadlines count on monotonic time, each process on its own."""

import asyncio
import os
import signal

import pytest

from tests.faults.world import ProxiedStack


class JumpingStack(ProxiedStack):
    """Every process runs under tests/faults/jumping.py."""

    launcher = ("-m", "tests.faults.jumping")


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
