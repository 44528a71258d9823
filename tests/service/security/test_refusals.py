import asyncio

import pytest

from baton.service.security import refusals
from baton.service.security.refusals import BURST, LONGEST_S, MAX_HELD, PER_S, Refusals


async def test_a_few_at_once_then_so_many_a_second(waits, clock):
    held = Refusals()
    for _ in range(BURST):
        await held.hold("loud")
    assert not waits
    for i in range(10):
        await held.hold("loud")
        assert waits[-1] == pytest.approx((i + 1) / PER_S)
    num = len(waits)
    await held.hold("quiet")
    assert len(waits) == num, "another tenant is answered at once"
    clock[0] += 10
    await held.hold("loud")
    assert len(waits) == num


async def test_none_waits_long(waits, clock):
    held = Refusals()
    for _ in range(5000):
        await held.hold("loud")
    assert max(waits) == pytest.approx(LONGEST_S)
    clock[0] += LONGEST_S + BURST / PER_S
    num = len(waits)
    await held.hold("loud")
    assert len(waits) == num


async def test_what_is_held_is_bounded_and_counted_back(clock, monkeypatch):
    held, over = Refusals(), asyncio.Event()
    monkeypatch.setattr(refusals, "sleep", lambda seconds: over.wait())
    calls = [asyncio.create_task(held.hold("loud")) for _ in range(MAX_HELD + BURST + 50)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert held.num_held == MAX_HELD and sum(call.done() for call in calls) == BURST + 50
    over.set()
    await asyncio.gather(*calls)
    assert held.num_held == 0


async def test_tenants_that_are_gone_are_forgotten(waits, clock):
    held = Refusals()
    for i in range(MAX_HELD + 1):
        await held.hold(f"t{i}")
    clock[0] += 10
    await held.hold("one")
    assert len(held._due) == 1
