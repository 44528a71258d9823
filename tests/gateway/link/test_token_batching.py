"""Tokens wait for each other only when there are more than a gateway can write one by one, and never for long."""

import asyncio
import time

import pytest

from baton.v1 import inference_pb2
from gateway.link import token_batching
from gateway.link.mailbox import Mailbox, Tokens
from gateway.link.token_batching import FREE_TOKENS_PER_S, LONGEST_S, MessageTurns, TokenBatching
from tests.support.pace import patience

LENGTH = inference_pb2.FINISH_REASON_LENGTH


class Clock:
    def __init__(self, monkeypatch):
        self.at = 100.0
        monkeypatch.setattr(token_batching, "now", lambda: self.at)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def flow(turns: MessageTurns, clock: Clock, tokens_per_s: float, seconds: float = 1.0, step_s: float = 0.01) -> None:
    for _ in range(round(seconds / step_s)):
        clock.at += step_s
        turns.begin(round(tokens_per_s * step_s))


def due(turns: MessageTurns, num: int = 12) -> list[int]:
    return [place for place in range(num) if turns.is_turn_of(place)]


def test_below_the_rate_nothing_waits(clock):
    turns = MessageTurns(TokenBatching())
    flow(turns, clock, 0.95 * FREE_TOKENS_PER_S)
    assert due(turns) == list(range(12))


@pytest.mark.parametrize("step_s, every", [(0.004, 4), (0.006, 3), (0.01, 2), (0.02, 1)])
def test_beyond_it_each_has_its_turn_as_often_as_the_bound_allows(clock, step_s, every):
    it = TokenBatching()
    turns = MessageTurns(it)
    flow(turns, clock, 2 * FREE_TOKENS_PER_S, 2.0, step_s)
    assert it.is_busy
    seen: list[int] = []
    for _ in range(every):
        flow(turns, clock, 2 * FREE_TOKENS_PER_S, step_s, step_s)
        assert len(due(turns)) == 12 // every, "no step has more messages than another"
        seen += due(turns)
    assert sorted(seen) == list(range(12))
    assert (every - 1) * step_s <= LONGEST_S


def test_all_workers_count_together(clock):
    it = TokenBatching()
    one, other = MessageTurns(it), MessageTurns(it)
    for _ in range(100):
        clock.at += 0.01
        one.begin(round(0.006 * FREE_TOKENS_PER_S))
        other.begin(round(0.006 * FREE_TOKENS_PER_S))
    assert it.is_busy and len(due(one)) == len(due(other)) == 6


def test_after_a_rest_nothing_waits(clock):
    turns = MessageTurns(TokenBatching())
    flow(turns, clock, 2 * FREE_TOKENS_PER_S)
    assert len(due(turns)) == 6
    clock.at += 60
    turns.begin(1)
    assert len(due(turns)) == 12


async def _next(mailbox: Mailbox, until: float) -> tuple | None:
    await mailbox.wait(until)
    return mailbox.pop()


async def test_what_waits_goes_on_without_another_step():
    it, mailbox, leg = TokenBatching(), Mailbox(), object()
    reading = asyncio.create_task(_next(mailbox, token_batching.now() + 60))
    await asyncio.sleep(0)
    mailbox.add(leg, 0, 5, [7], [], 0)
    it.hold([mailbox])
    await asyncio.sleep(0)
    assert not reading.done()
    assert await reading == (leg, Tokens(0, 5, [7], [], 0))
    assert mailbox.pop() is None
    mailbox.close()


def test_rows_that_go_on_are_read_as_one():
    mailbox, leg, other = Mailbox(), object(), object()
    mailbox.add(leg, 0, 5, [7], ["a"], 0)
    mailbox.add(leg, 0, 6, [8, 9], ["b", "c"], 0)
    mailbox.add(leg, 1, 6, [1], [], 0)  # another choice
    mailbox.add(leg, 1, 8, [2], [], 0)  # one is missing: its reader is to see that
    mailbox.add(other, 1, 9, [3], [], LENGTH)
    mailbox.add(other, 1, 10, [4], [], 0)  # behind an end
    read = []
    while (entry := mailbox.pop()) is not None:
        read.append(entry)
    assert read == [
        (leg, Tokens(0, 5, [7, 8, 9], ["a", "b", "c"], 0)),
        (leg, Tokens(1, 6, [1], [], 0)),
        (leg, Tokens(1, 8, [2], [], 0)),
        (other, Tokens(1, 9, [3], [], LENGTH)),
        (other, Tokens(1, 10, [4], [], 0)),
    ]


async def test_a_wait_ends_when_it_should_whatever_the_one_before():
    """The timer of a wait stays for the next one; one that ends sooner, or later, is not cut short or drawn out."""
    mailbox = Mailbox()
    for first_s, second_s in ((60.0, 0.02), (0.01, 0.05)):
        waiting = asyncio.create_task(_next(mailbox, token_batching.now() + first_s))
        await asyncio.sleep(0)
        mailbox.post(None, "read")
        assert await waiting == (None, "read") and mailbox.pop() is None
        until = token_batching.now() + second_s
        assert await _next(mailbox, until) is None and token_batching.now() >= until
    mailbox.close()


async def test_one_that_cannot_be_written_holds_up_no_other():
    """It is told by the event loop, as what a callback raises is."""
    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))

    class Broken(Mailbox):
        def flush(self) -> bool:
            raise OSError("broken")

    batching, box = TokenBatching(), Mailbox()
    for _ in range(2):
        box.add(None, 0, 0, [1], [], 0)
        batching.send([Broken(), box])
        async with asyncio.timeout(patience(10)):
            await box.wait(time.monotonic() + patience(20))
        assert box.pop() is not None and box.pop() is None
    assert [str(error) for error in told] == ["broken"] * 2
