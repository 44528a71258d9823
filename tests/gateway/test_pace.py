"""Tokens wait for each other only when there are more than a gateway can write one by one."""

import pytest

from baton.v1 import inference_pb2 as pb
from gateway import pace
from gateway.answer import Answer
from gateway.choice import LENGTH
from gateway.detokenizer import Detokenizer
from gateway.limits import check
from gateway.pace import FREE_TOKENS_PER_S, LONGEST_S, Pace
from gateway.timing import Stamps
from tests.client import make_request


class Clock:
    def __init__(self, monkeypatch):
        self.at = 100.0
        monkeypatch.setattr(pace, "now", lambda: self.at)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def flow(it: Pace, clock: Clock, tokens_per_s: float, seconds: float) -> None:
    for _ in range(round(100 * seconds)):
        clock.at += 0.01
        it.count(round(tokens_per_s / 100))


def test_the_gap_follows_the_rate(clock):
    it = Pace()
    assert it.gap_s == 0
    flow(it, clock, 0.9 * FREE_TOKENS_PER_S, 1)
    assert it.gap_s == 0
    flow(it, clock, 1.5 * FREE_TOKENS_PER_S, 1)
    assert it.gap_s == LONGEST_S
    clock.at += 60
    it.count(1)
    assert it.gap_s == 0, "after a rest nothing is held"


async def test_first_messages_and_endings_are_not_held(cluster):
    sent = []

    async def emit(message: pb.GenerateResponse) -> None:
        sent.append(message)

    async with cluster() as c:
        checked = check(make_request([5, 6], max_tokens=9), c.gateway.registry.model)
        detokenizer = Detokenizer(c.gateway._pipeline.tokenizer)
    busy = Pace()
    busy.gap_s = LONGEST_S
    answer = Answer(checked, detokenizer, Stamps(0.0), emit, lambda gap_s: None, busy)
    answer.push(0, 0, [20], [], 0)
    assert answer.hold_s == 0
    await answer.flush()
    answer.push(0, 1, [21], [], 0)
    assert answer.hold_s == LONGEST_S
    answer.push(0, 2, [22], [], 0)
    await answer.flush()
    assert [list(message.token_ids) for message in sent] == [[20], [21, 22]]
    answer.push(0, 3, [23], [], LENGTH)
    assert answer.hold_s == 0
