"""The log of a process: what a library says again and again is one line a minute."""

import logging

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
