"""Spans of a key, drawn from its stamps."""

import time
from typing import Any, cast

import pytest

from baton.service.observe import telemetry
from baton.service.observe.telemetry import CLOCK
from baton.worker.legs.states import LegEvent
from baton.worker.observe.spans import Spans
from baton.worker.wire.outbox import Outbox
from tests.support.worker.doubles import Bench
from tests.support.worker.key_paths import DONE, KEY, let


@pytest.fixture
def drawn(monkeypatch) -> dict[str, tuple[int, int]]:
    """Begin and end of each span that is drawn."""
    spans: dict[str, tuple[int, int]] = {}

    def emit(name, parent, begin, end, *args, **options) -> None:
        spans[name] = begin, end

    monkeypatch.setattr(telemetry, "enabled", lambda: True)
    monkeypatch.setattr(telemetry, "draw_later", lambda draw, *args: draw(*args))
    monkeypatch.setattr(telemetry, "emit_span", emit)
    return spans


async def test_a_prompt_behind_a_fetched_prefix_is_read_when_that_is_here(drawn, monkeypatch):
    bench = Bench()
    for event in (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED):
        let(bench, event)
    fetched_at = time.monotonic() + 5.0
    monkeypatch.setattr(time, "monotonic", lambda: fetched_at)
    for event in (LegEvent.PREFILL_HERE, LegEvent.PREFILL_DONE):
        let(bench, event)
    bench.engine_ends(KEY)
    (leg,) = bench.ended
    leg.outbox = Outbox(cast(Any, None))
    leg.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    Spans("tiny").draw(leg)
    launched_at = fetched_at + DONE.queue_s
    begin, launched, end = map(CLOCK.wall_ns, (fetched_at, launched_at, launched_at + DONE.prefill_s))
    found = {name: window for name, window in drawn.items() if name.startswith("prefill")}
    assert found == {"prefill": (begin, end), "prefill.queue": (begin, launched), "prefill.compute": (launched, end)}
