"""Threads for long texts: all but one for a tenant, in turns, and nothing is done for a call that is gone."""

import asyncio
import threading

import pytest

from gateway.text.text_threads import NUM_CHECKS, NUM_THREADS, TextThreads
from tests.support.pace import patience
from tests.support.waiting import until_async


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


def refuse(thread):
    raise RuntimeError("can't start new thread")


async def test_no_call_needs_a_thread_to_be_started(threads, monkeypatch):
    """Two such failures of a tenant, and each of its chats waited until its deadline, for ever."""
    monkeypatch.setattr(threading.Thread, "start", refuse)
    ran = []
    gates = [Gate(ran, name) for name in ("a1", "b1")]
    calls = [asyncio.create_task(threads.run(gate._name[0], gate)) for gate in gates]
    try:
        async with asyncio.timeout(patience(10)):
            await until_async(lambda: all(gate.began.is_set() for gate in gates))
            for gate in gates:
                gate.go.set()
            assert await asyncio.gather(*calls) == ["a1", "b1"]
            assert await threads.run("a", lambda: 2) == 2
    finally:
        for gate in gates:
            gate.go.set()


async def test_where_a_thread_cannot_be_started_none_stays(monkeypatch):
    start, started = threading.Thread.start, []

    def start_two(thread):
        if len(started) == 2:
            refuse(thread)
        started.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_two)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            TextThreads(3)
    await until_async(lambda: not any(thread.is_alive() for thread in started))
    assert len(started) == 2


def test_a_tenant_never_has_them_all():
    assert NUM_CHECKS >= 2
    assert NUM_THREADS >= 3, "nor does one long text hold up all others of its tenant"


async def test_a_tenant_alone_has_all_but_one():
    threads, ran = TextThreads(3), []
    gates = [Gate(ran, name) for name in ("a1", "a2", "a3", "b1")]
    calls = [asyncio.create_task(threads.run(gate._name[0], gate)) for gate in gates]
    try:
        for gate in (gates[0], gates[1], gates[3]):
            await gate.until_began()
        assert not gates[2].began.is_set(), "the last thread is for others"
        gates[1].go.set()
        assert await calls[1] == "a2", "the first one holds up no other"
    finally:
        for gate in gates:
            gate.go.set()
        await asyncio.gather(*calls)
        threads.close()


async def test_the_next_thread_is_for_who_has_fewest():
    threads, ran = TextThreads(4), []
    gates = {name: Gate(ran, name) for name in ("a1", "a2", "a3", "b1", "a4", "b2")}
    calls = [asyncio.create_task(threads.run(name[0], gate)) for name, gate in gates.items()]
    try:
        for name in ("a1", "a2", "a3", "b1"):
            await gates[name].until_began()
        gates["a1"].go.set()
        await until_async(lambda: gates["a4"].began.is_set() or gates["b2"].began.is_set())
        assert gates["b2"].began.is_set(), "a has two, b has one"
    finally:
        for gate in gates.values():
            gate.go.set()
        await asyncio.gather(*calls)
        threads.close()


async def test_of_two_threads_a_tenant_has_one(threads):
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
    assert not threads._pending.get("a"), "what is gone is not pending"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    behind = asyncio.create_task(threads.run("a", lambda: ran.append("behind")))
    await asyncio.sleep(0)
    assert threads._num_idle == 1 and not behind.done(), "a cancelled call keeps its thread until it ends"
    gate.go.set()
    await behind
    assert ran == ["first", "behind"]


async def test_what_work_raises_is_raised(threads):
    with pytest.raises(ZeroDivisionError):
        await threads.run("a", lambda: 1 / 0)
    assert await threads.run("a", lambda: 5) == 5
    assert threads._num_idle == 2
