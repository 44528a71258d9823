"""Measure what it costs to place workers on a Ray cluster: python bench/launchers.py [--quick] [--json FILE] [--only
PART ...].

The cluster is three raylets of this machine, on which `baton up` places a prefill and a decode worker; beside it the
same stack as child processes, twice, whose distance is the noise. All speak TLS at one address of this machine.
"""

if not __package__:  # started by its path
    from lib.as_module import run

    run()

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from baton import client
from baton.cli.launch.control import RemoteLauncher
from baton.service.security.tls import GATEWAY_NAME
from bench.lib.cpu_time import cpu_s
from bench.lib.paths import MODEL
from bench.lib.report import Report, finish, interleave, medians, start
from tests.support.client import make_request
from tests.support.launch.launchers import until
from tests.support.launch.ray_cluster import RayCluster, up_argv
from tests.support.process import Process
from tests.support.security.installation import API_KEY, Installation, install

PARTS = ("start", "tokens", "node")
LOCAL, RAY, AGAIN = ARMS = ("local", "ray", "local again")
_PROMPT = list(range(100, 164))


class Bench(NamedTuple):
    cluster: RayCluster
    made: Installation
    folder: Path

    @contextmanager
    def up(self, arm: str, *options: str) -> Iterator["Running"]:
        """Run a stack of one prefill and one decode worker."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        argv = up_argv(self.cluster, MODEL, self.made.folder, *options, "--threads=1", "--gateway.split=always")
        if arm != RAY:
            argv = [word for word in argv if word not in ("--launcher", "ray", "--address", self.cluster.address)]
        begun = time.monotonic()
        process = Process("up", argv, folder)
        try:
            ready = process.ready()
            yield Running(process, ready, self.made, time.monotonic() - begun)
            process.stop(30)
        finally:
            process.kill()


class Running(NamedTuple):
    process: Process
    ready: dict[str, str]
    made: Installation
    start_s: float

    @property
    def launcher(self) -> RemoteLauncher:
        return RemoteLauncher(self.ready["control"], self.made.access("operator"))

    def client(self) -> client.AsyncClient:
        access = self.made.access(key=API_KEY).for_client() | {"tls_server_name": GATEWAY_NAME}
        return client.AsyncClient(self.ready["grpc"], **access)

    def all_cpu_s(self) -> float:
        """Return the CPU time of all its processes: those that `baton up` has started, and on a cluster the workers and
        their actors."""
        found = {self.process.pid, *(each.pid for each in psutil.Process(self.process.pid).children(recursive=True))}
        for each in psutil.process_iter(["cmdline"]):
            argv = each.info["cmdline"] or ()
            if "--gateways" in argv and argv[argv.index("--gateways") + 1] == self.ready["fleet"]:
                found |= {each.pid, each.ppid()}
        return sum(cpu_s(psutil.Process(pid)) for pid in found)


async def ask(asked: client.AsyncClient, max_tokens: int) -> tuple[int, float]:
    """Return the tokens of one answer and the longest pause between two messages, in seconds."""
    last, pause, num = time.monotonic(), 0.0, 0
    async for message in asked.send(make_request(_PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True)):
        now, fresh = time.monotonic(), len(message.token_ids)
        if num:
            pause = max(pause, now - last)
        last, num = now, num + fresh
    return num, pause


async def ask_many(running: Running, number: int, max_tokens: int) -> list[tuple[int, float]]:
    async with running.client() as asked:
        return await asyncio.gather(*(ask(asked, max_tokens) for _ in range(number)))


def starts(report: Report, bench: Bench, is_quick: bool) -> None:
    """Measure from the command to the ready line, with a running cluster."""

    def start_s(arm: str) -> float:
        with bench.up(arm) as running:
            return running.start_s

    found = medians(interleave({arm: lambda arm=arm: start_s(arm) for arm in ARMS}, 1 if is_quick else 3))
    report.add("start of 1+1 over Ray", found[RAY], "s", against=found[LOCAL])
    report.add("start of 1+1, A/A", found[AGAIN], "s", against=found[LOCAL])
    report.add("start over Ray, beyond the local start", found[RAY] - found[LOCAL], "s", goal="value <= 3")


def tokens(report: Report, bench: Bench, is_quick: bool) -> None:
    """Measure the CPU time of all processes of a stack per token of eight streams."""
    number, max_tokens, rounds = (8, 64, 3) if is_quick else (8, 256, 7)
    with ExitStack() as exits:
        stacks = {arm: exits.enter_context(bench.up(arm)) for arm in ARMS}

        def us_of(running: Running) -> float:
            before = running.all_cpu_s()
            answers = asyncio.run(ask_many(running, number, max_tokens))
            return 1e6 * (running.all_cpu_s() - before) / sum(num for num, _ in answers)

        for running in stacks.values():
            us_of(running)  # warm
        arms = {arm: lambda running=running: us_of(running) for arm, running in stacks.items()}
        found = medians(interleave(arms, rounds))
        idle = ray_cpu_s()
        time.sleep(5)
        idle = (ray_cpu_s() - idle) / 5
    report.add(
        f"{number} streams: CPU of a token over Ray", found[RAY], "us", against=found[LOCAL], goal="ratio <= 1.05"
    )
    report.add(f"{number} streams: CPU of a token, A/A", found[AGAIN], "us", against=found[LOCAL])
    report.add("three raylets and the head's store, while nobody asks", idle, "cores")


def ray_cpu_s() -> float:
    """Return the CPU time of the cluster's own processes: raylets, and the head's store."""
    kept = [each for each in psutil.process_iter(["name"]) if each.info["name"] in ("raylet", "gcs_server")]
    return sum(cpu_s(each) for each in kept)


def node(report: Report, bench: Bench, is_quick: bool) -> None:
    """Kill a node with all its processes while eight streams run. This is the last part, since the node stays dead."""
    with bench.up(RAY, "--decode", "2") as running:
        pauses, filled_s = asyncio.run(lose_node(running, bench.cluster, 200 if is_quick else 1000))
    report.add("a node dies: longest pause of a stream that ran there", max(pauses), "s", goal="value <= 2")
    report.add("a node dies: pause of a stream, median of eight", statistics.median(pauses), "s")
    report.add("a node dies: until its worker's place is filled again", filled_s, "s")


async def lose_node(running: Running, cluster: RayCluster, max_tokens: int) -> tuple[list[float], float]:
    launcher = running.launcher
    before = await launcher.list()
    victim = next(each for each in before if each.role == "decode" and not each.where.endswith(cluster.head))
    asking = asyncio.create_task(ask_many(running, 8, max_tokens))
    await asyncio.sleep(0.5)
    killed = time.monotonic()
    await asyncio.to_thread(cluster.kill_node_of, victim.address)

    def is_whole(workers) -> bool:
        return sum(each.state == "serving" and each.where != victim.where for each in workers) == len(before)

    await until(launcher, is_whole)
    filled_s = time.monotonic() - killed
    return [pause for _, pause in await asking], filled_s


def main() -> int:
    arguments, report = start("launchers", __doc__.splitlines()[0], PARTS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as exits:
        cluster = RayCluster(Path(name))
        exits.callback(cluster.close)
        bench = Bench(cluster, install(Path(name) / "certs", "--host", cluster.host), Path(name))
        for part, measure in zip(PARTS, (starts, tokens, node), strict=True):
            if part in arguments.only:
                measure(report, bench, arguments.quick)
    return finish(arguments, report)


if __name__ == "__main__":
    sys.exit(main())
