"""The log of a process: what a library says again and again is one line a minute."""

import contextlib
import logging
import re
import sys
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


def test_a_line_that_cannot_be_written_is_counted(monkeypatch):
    kept, level, before = logging.getLogger().handlers[:], logging.getLogger().level, logs.num_lost()
    with open("/dev/full", "w", buffering=1) as full:  # what a disk says that has no room left
        monkeypatch.setattr(sys, "stderr", full)
        try:
            logs.setup("decode", "info")
            logging.getLogger("x").info("not read by any")
            assert logs.num_lost() == before + 1
        finally:
            logging.getLogger().handlers[:] = kept
            logging.getLogger().setLevel(level)
            monkeypatch.undo()
        with contextlib.suppress(OSError):  # its buffer
            full.close()


def test_one_line_a_record(capsys):
    kept = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.setup("decode", "info")
        logging.getLogger("x").info("ready %s", logs.fields(grpc="h:1", why="two words", none=""))
        logging.getLogger("x").debug("not shown")
        try:
            raise ValueError("of\ntwo lines")
        except ValueError:
            logging.getLogger("x").exception("failed")
    finally:
        logging.getLogger().handlers[:], level = kept
        logging.getLogger().setLevel(level)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r'\S+ decode INFO ready grpc=h:1 why="two words" none=""', first)
    assert "failed | Traceback" in second and "of | two lines" in second


FORGED = [
    'x" level=admin "',
    "x tenant=root",
    "x\nHH:MM:SS gateway INFO forged",
    "x\r\nforged",
    "\x1b[31mred\x1b[0m",
    "\x9b31mred",
    "\u202eback to front",
    "a\u2028b",
    "\x00\x07\x7f",
    "\udc80",
    'x\\" y="z',
]


@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
def test_no_value_forges_a_field_or_a_line(value, capsys):
    kept = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.setup("gateway", "info")
        logging.getLogger("x").warning("lost %s", logs.fields(reason=value, num=1))
        logging.getLogger("x").warning(f"lost {value}")
    finally:
        logging.getLogger().handlers[:], level = kept
        logging.getLogger().setLevel(level)
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert re.fullmatch(r'.* WARNING lost reason=("([^"\\]|\\.)*"|[^ "]+) num=1', lines[0])


def test_callers_that_have_gone_leave_no_traceback(capsys):
    """gRPC logs one for each that goes just before it is answered: any client that reaches a port could fill the
    log."""
    kept = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.setup("gateway", "info")
        grpcs = logging.getLogger("grpc._cython.cygrpc")
        grpcs.error("ExecuteBatchError raised in core by servicer method [%s]", "/x/Y", exc_info=ValueError("gone"))
        grpcs.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/x/Y")
    finally:
        logging.getLogger().handlers[:], level = kept
        logging.getLogger().setLevel(level)
    said = capsys.readouterr().err
    assert "ExecuteBatchError" not in said and "Unexpected [KeyError]" in said


def test_a_long_value_is_cut():
    assert len(logs.fields(state="x" * 1_000_000)) < 1100


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="loud"):
        logs.setup("decode", "loud")
