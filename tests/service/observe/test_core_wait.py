"""Waiting for a core, and the delay of an event loop: made on purpose, and told apart."""

import asyncio
import multiprocessing
import os
import threading
import time

import pytest

from baton import system
from baton.service.observe import core_wait
from baton.service.observe.core_wait import CoreWait, EventLoopWatch, PathDelay

pytestmark = pytest.mark.skipif(not system.LINUX, reason="only Linux tells how long threads wait")


def spin() -> None:
    while True:
        pass


@pytest.fixture
def crowded():
    """One core for this thread, with two others that never stop."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    others = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(2)]
    for other in others:
        other.start()  # with our core
    yield
    for other in others:
        other.kill()
        other.join()
    os.sched_setaffinity(0, mine)


def busy_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_threads_that_run_wait_less_than_they_run(crowded):
    thread = threading.get_native_id()
    time.sleep(0.5)  # until both spin
    ran, waited = system.run_and_wait_ns()[thread]
    busy_for(1.0)
    more_ran, more_waited = system.run_and_wait_ns()[thread]
    assert more_waited - waited > more_ran - ran > 0  # a third of the core


def test_the_share_is_of_the_time_since_the_last_look(crowded, monkeypatch):
    time.sleep(0.5)
    monkeypatch.setattr(core_wait, "_LEAST_S", 0.0)
    watch, other = CoreWait(), threading.Thread(target=busy_for, args=(1.5,))
    other.start()
    time.sleep(1.0)
    assert 0.3 < watch.share() < 1.0


def test_a_process_whose_threads_sleep_waits_for_no_core(crowded, monkeypatch):
    monkeypatch.setattr(core_wait, "_LEAST_S", 0.0)
    watch, other = CoreWait(), threading.Thread(target=time.sleep, args=(1.0,))
    other.start()
    other.join()
    assert watch.share() < 0.3


async def watched(work) -> EventLoopWatch:
    watch = EventLoopWatch()
    task = asyncio.create_task(watch.run())
    for _ in range(20):
        await asyncio.sleep(0.02)
        work()
    task.cancel()
    return watch


async def test_a_loop_that_is_blocked_is_busy():
    delay = (await watched(lambda: time.sleep(0.2))).delay
    assert delay.busy_s > 0.02 and delay.busy_s > 4 * delay.core_s
    core, busy, network = PathDelay(delay).shares()
    assert busy > 0.8 and network == 0 and core + busy == pytest.approx(1)


async def test_nothing_measured_is_the_gateways_own():
    assert PathDelay().shares() == (0.0, 1.0, 0.0)
