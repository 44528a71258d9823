"""A phase of a start is reported once it is long, and not when it is short."""

import io
import sys
import threading
import time

from baton.service import progress


def test_a_long_phase_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.phase("decode_worker", "reading /m", quiet_s=0):
        while not (said := sys.stderr.getvalue()).endswith("\n"):
            time.sleep(0.001)
    assert said == "starting: decode_worker: reading /m\n"


def test_a_short_one_says_nothing(capsys, monkeypatch):
    timers = []
    monkeypatch.setattr(threading, "Timer", lambda *args: timers.append(Timer(*args)) or timers[-1])
    with progress.phase("decode_worker", "reading /m"):
        assert timers[0].started and not timers[0].cancelled
    assert timers[0].cancelled and capsys.readouterr().err == ""


class Timer:
    def __init__(self, *args):
        self.started = self.cancelled = False

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True
