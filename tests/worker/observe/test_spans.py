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
from tests.support.worker.doubles import Bench
from tests.support.worker.key_paths import DONE, KEY, bring_to, let


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


def emit(bench: Bench) -> None:
    """Draw the leg that has ended."""
    (leg,) = bench.ended
    leg.outbox = Outbox(cast(Any, None))
    leg.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    Spans("tiny").emit(leg)


def cancel(bench: Bench, is_answered: bool) -> None:
    bench.obey(cancel=pb.Cancel(key=pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), answered=is_answered))


async def test_a_prompt_behind_a_fetched_prefix_is_read_when_that_is_here(emitted, monkeypatch):
    bench = Bench()
    for event in (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED):
        let(bench, event)
    fetched_at = time.monotonic() + 5.0
    monkeypatch.setattr(time, "monotonic", lambda: fetched_at)
    for event in (LegEvent.PREFILL_HERE, LegEvent.PREFILL_DONE):
        let(bench, event)
    bench.engine_ends(KEY)
    emit(bench)
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
    bench = Bench()
    bring_to(bench, LegState.RUNNING)
    if ending == "deadline":
        let(bench, LegEvent.DEADLINE)
    else:
        cancel(bench, ending == "answered")
    bench.commands.on_outputs([RequestEnded(KEY, "cancelled", report=DecodeReport(num_steps=3))])
    emit(bench)
    told = {name: (span.status, span.error_type) for name, span in emitted.items()}
    assert told["decode"] == told["decode.steps"] == ENDINGS[ending]
    assert told["decode.queue"] == told["kv.transfer"] == ("ok", None)


async def test_a_fetch_that_the_end_of_the_answer_stops_is_no_cancelled_one(emitted):
    """As where the first token is the last."""
    bench = Bench()
    bring_to(bench, LegState.FETCHING)
    cancel(bench, is_answered=True)
    bench.engine_ends(KEY, "cancelled")
    let(bench, LegEvent.FETCH_FAILED)
    emit(bench)
    assert emitted["kv.transfer"].status == "ok"
