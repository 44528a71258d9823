"""A real Ray cluster of three raylets on this machine, and a `baton up` that places its workers there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.process import Process

# Ray reports how it is used, to its makers; and says so.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = {"include_dashboard": False, "object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **node})
for _ in range(2):
    cluster.add_node(num_cpus=2, **node)
print("ready", cluster.address, cluster.head_node.node_id[:8], flush=True)
sys.stdin.read()
"""


class RayCluster:
    """The head has room for one worker, each of two further nodes for two."""

    def __init__(self, folder: Path):
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "cluster.log").open("wb"),
            text=True,
            cwd=folder,  # of all processes that Ray starts
            env=os.environ
            | {"RAY_worker_niceness": "0"},  # 15 by itself: workers would wait for all else that runs here
            start_new_session=True,
        )
        lines = iter(self._popen.stdout.readline, "")
        _, self.address, self.head = next(line.split() for line in lines if line.startswith("ready "))
        self.host = self.address.rpartition(":")[0]
        self._all = [self._popen.pid, *(each.pid for each in psutil.Process(self._popen.pid).children(recursive=True))]

    def kill_node_of(self, address: str) -> None:
        """Send SIGKILL to the raylet of the node whose worker listens at `address`, and to every process on that node,
        at once."""
        workers = [each for each in psutil.process_iter(["cmdline"]) if address in (each.info["cmdline"] or ())]
        raylet = next(each for each in workers[0].parents() if each.name() == "raylet")
        victims = [raylet, *raylet.children(recursive=True)]
        for victim in victims:
            victim.suspend()  # so that none sees another die
        for victim in victims:
            victim.kill()

    def close(self) -> None:
        for pid in reversed(self._all):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # of a node that a test has killed
                pass
        self._popen.wait()
        self._popen.stdin.close()
        self._popen.stdout.close()


def up_argv(cluster: RayCluster, model: Path, certs: Path, *options: str) -> list[str]:
    argv = [sys.executable, "-m", "baton.cli", "up", "--launcher", "ray", "--address", cluster.address]
    argv += ["--model", str(model), "--certs", str(certs), "--control", "127.0.0.1:0"]  # other tests have stacks too
    return [*argv, "--listen", f"{cluster.host}:0", *options]


@contextmanager
def up_on_ray(
    cluster: RayCluster, model: Path, certs: Path, folder: Path, *options: str, env: dict[str, str] | None = None
) -> Iterator[tuple[Process, dict[str, str]]]:
    """Yield `baton up` and the fields of its ready line; at the end it drains by SIGTERM, and ends with 0."""
    folder.mkdir(parents=True, exist_ok=True)
    process = Process("up", up_argv(cluster, model, certs, "--num-blocks=160", *options), folder, env)
    try:
        yield process, process.ready()
        process.terminate()
        assert process.stop() == 0, process.text()
    finally:
        process.kill()
