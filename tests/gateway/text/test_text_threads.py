"""Threads for long texts: one a tenant, in turns, and nothing is done for a call that is gone."""

import asyncio
import threading

import pytest

from gateway.text.text_threads import NUM_THREADS, TextThreads


class Gate:
    """Work that waits to be released, and notes that it ran."""

    def __init__(self, ran: list, name: str):
        self.began, self.go, self._ran, self._name = threading.Event(), threading.Event(), ran, name

    def __call__(self):
        self.began.set()
        assert self.go.wait(10)
        self._ran.append(self._name)
        return self._name

    async def until_began(self):
        assert await asyncio.to_thread(self.began.wait, 10)


@pytest.fixture
def threads():
    made = TextThreads(2)
    yield made
    made.close()


def test_a_tenant_never_has_them_all():
    assert NUM_THREADS >= 2


async def test_one_running_call_a_tenant(threads):
    ran = []
    gates = [Gate(ran, name) for name in ("a1", "a2", "b1")]
    calls = [asyncio.create_task(threads.run(gate._name[0], gate)) for gate in gates]
    await gates[0].until_began()
    await gates[2].until_began()
    assert not gates[1].began.is_set(), "a second thread for the same tenant"
    for gate in gates:
        gate.go.set()
    assert await asyncio.gather(*calls) == ["a1", "a2", "b1"]


async def test_tenants_take_turns(threads):
    ran = []
    first = [Gate(ran, "x"), Gate(ran, "y")]
    busy = [asyncio.create_task(threads.run(gate._name, gate)) for gate in first]
    await first[0].until_began()
    await first[1].until_began()
    flood = [asyncio.create_task(threads.run("flood", lambda i=i: ran.append(f"flood{i}"))) for i in range(50)]
    await asyncio.sleep(0)
    quiet = asyncio.create_task(threads.run("quiet", lambda: ran.append("quiet")))
    await asyncio.sleep(0)
    first[0].go.set()
    await asyncio.gather(quiet, *flood)
    assert ran.index("quiet") <= 2, "one of the flood at most was before it"
    first[1].go.set()
    await asyncio.gather(*busy)


async def test_what_is_gone_is_not_done(threads):
    ran = []
    gate = Gate(ran, "first")
    running = asyncio.create_task(threads.run("a", gate))
    await gate.until_began()
    gone = [asyncio.create_task(threads.run("a", lambda: ran.append("gone"))) for _ in range(1000)]
    await asyncio.sleep(0)
    for call in gone:
        call.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    assert not threads._lines["a"], "what is gone is held in no line"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    behind = asyncio.create_task(threads.run("a", lambda: ran.append("behind")))
    await asyncio.sleep(0)
    assert threads._num_idle == 1 and not behind.done(), "a cancelled call keeps its tenant's thread until it ends"
    gate.go.set()
    await behind
    assert ran == ["first", "behind"]


async def test_what_work_raises_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 / 0)
    assert await threads.run("a", lambda: 5) == 5
    assert threads._num_idle == 2
