"""The log of a process: what a library says again and again is one line a minute."""

import logging
import re
import time
from datetime import UTC, datetime

import pytest

from baton.service import logs


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved; the log is as it was afterwards."""
    root, at = logging.getLogger(), [1000.0]
    handlers, level = list(root.handlers), root.level
    monkeypatch.setattr(logs.time, "monotonic", lambda: at[0])
    yield at
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def zone(monkeypatch):
    """Half an hour beside the others, as India has it."""
    monkeypatch.setenv("TZ", "IST-05:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "name, shown", [(None, "decode"), ("", "decode"), ("decode worker 2", "decode worker 2"), ("%s", "%s")]
)
def test_a_line_says_when_and_who(zone, clock, capsys, monkeypatch, name, shown):
    """The day and the offset too; and which process it is of those whose lines are in one log."""
    monkeypatch.delenv(logs.NAME_VARIABLE, raising=False)
    if name is not None:
        monkeypatch.setenv(logs.NAME_VARIABLE, name)
    logs.setup("decode")
    before = datetime.now(UTC).replace(microsecond=0)
    logging.getLogger("x").info("ready %s", "h:1")
    (line,) = capsys.readouterr().err.splitlines()
    found = re.fullmatch(rf"(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}}\+05:30) {re.escape(shown)} INFO ready h:1", line)
    assert found and before <= datetime.fromisoformat(found[1]) <= datetime.now(UTC)


def test_a_collector_that_is_away_is_a_line_a_minute(clock, capsys):
    logs.setup("gateway")
    log = logging.getLogger("opentelemetry.exporter")  # the exporters' own ones drop what is said twice
    for _ in range(13):
        log.warning("Transient error %s", "UNAVAILABLE")
        clock[0] += 10
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("WARNING ")[2] for line in lines] == [
        "Transient error UNAVAILABLE",
        "Transient error UNAVAILABLE (5 more such lines before)",
        "Transient error UNAVAILABLE (5 more such lines before)",
    ]


def test_others_are_not_held_back(clock, capsys):
    logs.setup("gateway")
    for name in ("opentelemetry.sdk", "gateway.app", "opentelemetryish"):
        for _ in range(3):
            logging.getLogger(name).error("of %s", name)
    lines = capsys.readouterr().err.splitlines()
    assert [sum(line.endswith(f"of {name}") for line in lines) for name in ("opentelemetry.sdk", "gateway.app")] == [
        1,
        3,
    ]
    assert sum(line.endswith("opentelemetryish") for line in lines) == 3
