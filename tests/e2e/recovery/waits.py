"""What tests of recovery wait for."""

import json
import time
from urllib.error import HTTPError
from urllib.request import urlopen

from tests.support.observe.probe import Probe
from tests.support.pace import patience
from tests.support.stack import Stack


def await_workers(stack: Stack, gateway, timeout_s: float = 30) -> None:
    """Wait until a gateway has a session with every worker."""
    deadline = time.monotonic() + patience(timeout_s)
    while True:
        try:
            page = urlopen(f"http://{gateway.ready()['admin']}/readyz", timeout=5).read()
        except HTTPError as error:
            page = error.read()
        states = {worker["state"] for worker in json.loads(page)["workers"].values()}
        if states == {"serving"}:
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.02)


def decoding_at(stack: Stack) -> list:
    """Return the decode workers with something to do, the busiest first. Waits for one: a report may be older than
    the work."""
    deadline = time.monotonic() + patience(5)
    while True:
        loads = []
        for process in stack.decode:
            probe = Probe(stack.address[process.name])
            loads.append((probe.load().num_running, process))
            probe.close()
        if busy := [process for num, process in sorted(loads, key=lambda each: -each[0]) if num]:
            return busy
        assert time.monotonic() < deadline, "no worker decodes"
