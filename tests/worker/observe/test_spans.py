"""Spans of a key, made from its stamps."""

import time
from typing import Any, NamedTuple, cast

import pytest

from baton.engine.core.request import DecodeReport, RequestEnded
from baton.service.observe import telemetry
from baton.service.observe.telemetry import CLOCK
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import LegEvent, LegState
from baton.worker.observe.spans import Spans
from baton.worker.wire.outbox import Outbox
from tests.support.worker.fakes import LegMachineHarness
from tests.support.worker.key_paths import DONE, KEY, bring_to, make_happen


class Emitted(NamedTuple):
    window: tuple[int, int]
    status: str
    error_type: str | None


@pytest.fixture
def emitted(monkeypatch) -> dict[str, Emitted]:
    """Each span that is emitted, by its name."""
    spans: dict[str, Emitted] = {}

    def emit(name, parent, begin, end, attributes, status, **options) -> None:
        spans[name] = Emitted((begin, end), status, attributes.get("error.type"))

    monkeypatch.setattr(telemetry, "enabled", lambda: True)
    monkeypatch.setattr(telemetry, "emit_later", lambda emit, *args: emit(*args))
    monkeypatch.setattr(telemetry, "emit_span", emit)
    return spans


def emit(harness: LegMachineHarness) -> None:
    """Draw the leg that has ended."""
    (leg,) = harness.ended
    leg.outbox = Outbox(cast(Any, None))
    leg.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    Spans("tiny").emit(leg)


def cancel(harness: LegMachineHarness, is_answered: bool) -> None:
    harness.dispatch(cancel=pb.Cancel(key=pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), answered=is_answered))


async def test_a_prompt_behind_a_fetched_prefix_is_read_when_that_is_here(emitted, monkeypatch):
    harness = LegMachineHarness()
    for event in (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED):
        make_happen(harness, event)
    fetched_at = time.monotonic() + 5.0
    monkeypatch.setattr(time, "monotonic", lambda: fetched_at)
    for event in (LegEvent.PREFILL_HERE, LegEvent.PREFILL_DONE):
        make_happen(harness, event)
    harness.engine_ends(KEY)
    emit(harness)
    launched_at = fetched_at + DONE.queue_s
    begin, launched, end = map(CLOCK.wall_ns, (fetched_at, launched_at, launched_at + DONE.prefill_s))
    found = {name: span.window for name, span in emitted.items() if name.startswith("prefill")}
    assert found == {"prefill": (begin, end), "prefill.queue": (begin, launched), "prefill.compute": (launched, end)}


ENDINGS = {
    "answered": ("ok", None),
    "cancelled": ("cancelled", None),
    "deadline": ("error", "DEADLINE_EXCEEDED"),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_how_the_answer_ended_is_on_the_spans_of_its_decoding(emitted, ending):
    """By a stop string it ends at the gateway, which cancels what goes on here."""
    harness = LegMachineHarness()
    bring_to(harness, LegState.RUNNING)
    if ending == "deadline":
        make_happen(harness, LegEvent.DEADLINE)
    else:
        cancel(harness, ending == "answered")
    harness.dispatcher.on_outputs([RequestEnded(KEY, "cancelled", report=DecodeReport(num_steps=3))])
    emit(harness)
    told = {name: (span.status, span.error_type) for name, span in emitted.items()}
    assert told["decode"] == told["decode.steps"] == ENDINGS[ending]
    assert told["decode.queue"] == told["kv.transfer"] == ("ok", None)


async def test_a_fetch_that_the_end_of_the_answer_stops_is_no_cancelled_one(emitted):
    """As where the first token is the last."""
    harness = LegMachineHarness()
    bring_to(harness, LegState.FETCHING)
    cancel(harness, is_answered=True)
    harness.engine_ends(KEY, "cancelled")
    make_happen(harness, LegEvent.FETCH_FAILED)
    emit(harness)
    assert emitted["kv.transfer"].status == "ok"
