"""E9, G5, G7: disks and memory that are full while processes run, and when they start.

A full disk is a limit on the size of files here: every write fails as it does when no space is left, without root and
in any container. Redis with `appendfsync always` ends itself over it, with `everysec` it refuses writes.
"""

import asyncio
import contextlib
import re
import subprocess
import sys

import psutil
import pytest
import redis

from tests.support.faults.cases import A_HINT, ask_some, warm_prompts
from tests.support.faults.checker import Counters
from tests.support.faults.limits import full_disk, limited
from tests.support.process import ROOT

KIB = 1 << 10


@pytest.mark.faults
@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_the_disk_of_redis_is_full(case, fsync):
    async with case(f"E9 {fsync}", A_HINT) as c:
        prompts, server = await warm_prompts(c), c.world.redis
        server.client.config_set("appendfsync", fsync)
        server.client.config_set("appendonly", "yes")
        while server.client.info("persistence")["aof_rewrite_in_progress"]:
            await asyncio.sleep(0.01)
        with full_disk(server.process):
            await ask_some(c, prompts)
            with contextlib.suppress(redis.RedisError):  # a write that is refused, or the end of it
                server.client.set("kv:one more", 1)
            await ask_some(c, prompts)
            c.figures["redis"] = "refuses writes" if server.process.alive else "has ended itself"
        if server.process.alive:
            server.client.config_set("appendonly", "no")
        else:
            await c.world.aside(server.start)


@pytest.mark.faults
async def test_no_log_can_be_written(case):
    async with case("G7", "answered, and lines that are lost are counted") as c:
        with contextlib.ExitStack() as exits:
            for process in c.stack.processes:
                exits.enter_context(full_disk(process))
            await c.ended(*c.ask_many(8, 200))
        lost = Counters(c.world.gateway.ready()["admin"]).num_lost_lines
        assert lost >= 8, "a request is a line"
        c.figures["lines_lost"] = int(lost)


@pytest.mark.faults
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_memory_is_left(case, role):
    """A worker keeps its mapped memory and gets no more. Its requests end, or the process does; the other worker
    answers."""
    allowed = ("OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED")
    async with case(f"G5 {role}", "answered, or a typed end; no other request is affected", allowed) as c:
        c.known_words = ("Traceback",)
        tight = getattr(c.stack, role)[0]
        with limited(tight, psutil.RLIMIT_AS, 1 << 20):
            asks = [*c.ask_many(6, 400, max_tokens=100), *c.ask_many(6, 40, max_tokens=20)]
            await c.ended()
            c.figures["worker"] = "lives" if tight.alive else f"ended, status {tight.popen.returncode}"
            c.figures["refused_allocations"] = len(re.findall("allocat|MemoryError|new thread", tight.text()))
        tight.killed = not tight.alive
        assert sum(ask.status == "OK" for ask in asks) >= len(asks) // 2


def limited_run(argv: list[str], resource: str) -> tuple[int, str]:
    """Exit status and stderr."""
    run = subprocess.run(["prlimit", resource, sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True,
                         timeout=120)  # fmt: skip
    assert "Traceback" not in run.stderr, run.stderr
    return run.returncode, run.stderr.strip()


@pytest.mark.faults
def test_no_room_for_the_pool(model):
    """Its memory is a file too."""
    status, said = limited_run(
        ["decode_worker", "--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1"], f"--fsize={64 * KIB}"
    )
    assert status in (1, 2) and "KV" in said.splitlines()[-1], said


@pytest.mark.faults
def test_no_room_for_a_quantized_model(model, tmp_path):
    """Nothing of it is left, and there is nothing at the model's path."""
    out = tmp_path / "out"
    status, said = limited_run(
        ["baton.cli.main", "quantize", "--model", str(model), "--scheme", "int8-weight-only", "--out", str(out)],
        f"--fsize={16 * KIB}",
    )
    assert status == 1 and "not written" in said.splitlines()[-1], said
    assert not list(tmp_path.iterdir())
