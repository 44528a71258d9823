"""Codec, logs and the health probe."""

import asyncio
import contextlib
import logging
import re
import subprocess
import sys
import time

import pytest

from baton.service import codec, logs
from baton.service.net import probe
from baton.service.net.server import Health, bind, make_server


def test_key_both_ways():
    assert codec.key_from_proto(codec.key_to_proto(("a", 3))) == ("a", 3)


def test_budget_is_a_duration():
    assert codec.budget_ms(time.monotonic() - 1) == 0
    assert 9_000 < codec.budget_ms(time.monotonic() + 10) <= 10_000
    assert codec.budget_ms(float("inf")) == (1 << 32) - 1
    assert codec.deadline_of(5000) == pytest.approx(time.monotonic() + 5, abs=2)


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


def test_unknown_level():
    with pytest.raises(ValueError, match="loud"):
        logs.setup("decode", "loud")


async def test_probe(capsys):
    server = make_server()
    health, port = Health(server), bind(server, "127.0.0.1:0")
    await server.start()
    target = f"127.0.0.1:{port}"
    assert await asyncio.to_thread(probe.main, [target]) == 1
    health.set("", True)
    assert await asyncio.to_thread(probe.main, [target]) == 0
    assert await asyncio.to_thread(probe.main, [target, "--service", "none.such"]) == 1
    await server.stop(0)
    assert await asyncio.to_thread(probe.main, [target]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["NOT_SERVING", "SERVING", "NOT_FOUND", "UNAVAILABLE"]


@pytest.mark.parametrize("argv", [[], ["h:1", "--what"]])
def test_probe_wrong_use(argv):
    done = subprocess.run([sys.executable, "-m", "baton.service.net.probe", *argv], capture_output=True)
    assert done.returncode == 2


def test_service_loads_no_torch():
    names = ["errors", "net.server", "net.client", "codec", "observe.telemetry", "logs", "settings", "net.probe"]
    program = f"import sys; {'; '.join(f'import baton.service.{name}' for name in names)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "redis", "opentelemetry", "transformers", "numpy"} & set(loaded)
