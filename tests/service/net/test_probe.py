"""The health probe of containers: its exit status and its one line."""

import asyncio
import subprocess
import sys

import pytest

from baton.service.net import probe
from baton.service.net.server import Health, bind, make_server


async def test_the_probe_tells_whether_a_process_and_a_service_serve(capsys):
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
