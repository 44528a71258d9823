"""Places for calls: whose are full, who gives way, and what is left when all have gone; with callers that never
speak."""

import asyncio
import random
import time

import pytest

from baton.service.errors import DeadlineExceeded, InvalidRequest, Overloaded
from baton.service.security import call_slots
from baton.service.security.call_slots import CallSlots

GENERATE, CHECK, WATCH = "/baton.v1.Inference/Generate", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


async def nothing():
    await asyncio.get_running_loop().create_future()
    yield


async def said(*messages):
    for message in messages:
        yield message


async def spoken(places: CallSlots, method: str, caller, peer: str = "ipv4:198.51.100.7:1"):
    """A place whose message has come."""
    place = places.enter(method, caller, peer)
    assert await place.first(said("m").__anext__) == "m"
    return place


def is_empty(places: CallSlots) -> bool:
    return not (places._num_open or places._num_watches or places._silent or places._of_tenants)


async def fill(places: CallSlots, method: str, caller, peer: str = "ipv4:198.51.100.7:1") -> list:
    """As many as fit."""
    held = []
    with pytest.raises(Overloaded) as caught:
        while len(held) < 10_000:
            held.append(await spoken(places, method, caller, peer))
    assert caught.value.reason == "TOO_MANY_CALLS" and caught.value.retry_after_s
    return held


async def test_a_tenant_alone_has_all_slots_and_a_newcomer_its_part():
    places = CallSlots(256)
    held = await fill(places, GENERATE, "flood")
    assert len(held) == 256
    for num_sharing, name in enumerate(("second", "third", "fourth"), 2):
        come = await fill(places, GENERATE, name)
        assert len(come) == 256 // num_sharing
        held += come
    for place in held:
        with place:
            pass
    assert is_empty(places)


async def test_a_quota_bounds_what_is_open():
    places = CallSlots(256, {"acme": 2}.get)
    assert len(await fill(places, GENERATE, "acme")) == 10  # eight more, which the quota refuses in its own words
    assert len(await fill(places, GENERATE, "globex")) == 246


@pytest.mark.parametrize("method", [GENERATE, CHECK, "/baton.v1.Worker/Session", "/baton.kv.Raw/Pull"])
async def test_who_says_nothing_gives_way_to_who_comes(method, monkeypatch):
    """However many there are and however long that takes; and the newest of them is heard."""
    patient = {name: kind._replace(first_message_s=600.0) for name, kind in call_slots._KINDS.items()}
    monkeypatch.setattr(call_slots, "_KINDS", patient)
    monkeypatch.setattr(call_slots, "_OTHERS", call_slots._OTHERS._replace(first_message_s=600.0))
    places, caller = CallSlots(32), "acme" if method == GENERATE else None
    silent = []
    for _ in range(3000):
        place = places.enter(method, caller, "ipv4:198.51.100.7:1")
        silent.append((place, asyncio.create_task(place.first(nothing().__anext__))))
        await asyncio.sleep(0)
        with await spoken(places, method, caller):
            pass
    ended = [task for _, task in silent if task.done()]
    assert len(ended) >= 1900 and all(task.exception().reason == "TOO_MANY_CALLS" for task in ended)
    for place, task in silent:
        task.cancel()
        with place:
            pass
    await asyncio.gather(*(task for _, task in silent), return_exceptions=True)
    assert is_empty(places)


async def test_who_has_spoken_keeps_its_place():
    places = CallSlots(8)
    held = [await spoken(places, GENERATE, "default") for _ in range(7)]
    silent = places.enter(GENERATE, "default", "ipv4:198.51.100.7:1")
    waiting = asyncio.create_task(silent.first(nothing().__anext__))
    await asyncio.sleep(0)
    held.append(await spoken(places, GENERATE, "default"))
    with pytest.raises(Overloaded, match="newer"):
        await waiting
    with pytest.raises(Overloaded, match="8 calls"):
        places.enter(GENERATE, "default", "ipv4:198.51.100.7:1")
    assert len(held) == 8


async def test_kinds_and_callers_are_apart():
    places = CallSlots(16)
    await fill(places, GENERATE, "default")
    for method in (CHECK, WATCH, "/baton.v1.Fleet/ListWorkers", "/baton.v1.Registration/Register"):
        await fill(places, method, None)
        await fill(places, method, frozenset(("operator",)))
        await spoken(places, method, "acme")


async def test_watches_of_strangers():
    """Two a host, sixteen in all; on loopback, where all share an address, two a connection."""
    places = CallSlots()
    assert len(await fill(places, WATCH, None, "ipv4:198.51.100.7:1")) == 2
    with pytest.raises(Overloaded, match="198.51.100.7"):
        places.enter(WATCH, None, "ipv4:198.51.100.7:2")
    for peer in ("ipv6:%5B2001:db8::7%5D:1", "ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "ipv6:%5B::1%5D:1",
                 "ipv6:%5B::1%5D:2", "unix:", "ipv4:198.51.100.8:1"):  # fmt: skip
        assert len(await fill(places, WATCH, None, peer)) == 2
    with pytest.raises(Overloaded, match="16 calls"):
        places.enter(WATCH, None, "ipv4:198.51.100.9:1")
    assert len(await fill(places, WATCH, "acme")) == 16  # a known tenant is bounded alone


async def test_a_message_that_is_late_and_one_that_never_comes():
    """Each in its own time, by one timer."""
    places, ends = CallSlots(), []

    async def call() -> None:
        with places.enter(CHECK, None, "") as place, pytest.raises(DeadlineExceeded, match="first message") as caught:
            await place.first(nothing().__anext__)
        assert caught.value.reason == "MESSAGE_LATE"
        ends.append(time.monotonic() - place.entered_at)

    with places.enter(CHECK, None, "") as place, pytest.raises(InvalidRequest):
        await place.first(said().__anext__)
    calls = []
    for _ in range(3):
        calls.append(asyncio.create_task(call()))
        await asyncio.sleep(0.5)
        assert len(places._watched) == 1
    await asyncio.wait_for(asyncio.gather(*calls), 30)
    assert all(end >= 1.99 for end in ends)
    assert is_empty(places)


async def test_a_call_that_ends_by_itself_is_not_said_to_be_late():
    places = CallSlots()

    async def call() -> None:
        with places.enter(GENERATE, "acme", "") as place:
            await place.first(nothing().__anext__)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_empty(places)


@pytest.mark.parametrize("seed", range(20))
async def test_by_chance_nothing_is_left(seed):
    """Calls that come, speak, stay silent, are cancelled and go, in any order: bounds hold, and all is given back."""
    rng, places = random.Random(seed), CallSlots(40)
    methods, callers = (GENERATE, CHECK, WATCH), (None, "acme", "globex", frozenset(("operator",)))

    async def call() -> None:
        with places.enter(rng.choice(methods), rng.choice(callers), f"ipv4:10.0.0.{rng.randrange(9)}:1") as place:
            await place.first((said("m") if rng.random() < 0.5 else nothing()).__anext__)
            await asyncio.sleep(rng.random() / 100)

    tasks = []
    for _ in range(600):
        tasks.append(asyncio.create_task(call()))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        assert places._of_tenants.total() <= 40 + 20 + 13
        assert all(0 < num <= 256 for num in places._num_open.values())
    await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert is_empty(places)
