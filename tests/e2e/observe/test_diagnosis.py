"""Twelve causes of slowness, each made on purpose: the sentence about what bounds the stack names it.

What else runs on this machine takes cores too, and then "cores" is the truth: a busy machine skips these tests.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.service.observe.cpu_usage import CpuUsage
from baton.v1 import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from bench.gateway import clients, fleet, seen
from tests.support.client import make_request
from tests.support.launch.two_hosts import ALONE, MAKE_TWO_HOSTS, ON_OTHER
from tests.support.pace import patience, slowness
from tests.support.process import ROOT, Process
from tests.support.stack import Stack

MODEL = ROOT / "demo" / "target"
OPTIONS = ("--num-blocks", "400", "--threads", "1")
SECONDS = 8.0  # of load
CGROUP = Path("/sys/fs/cgroup/cpu")
NARROW = (("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0))  # what a client takes unread of a stream
# What comes faster is dropped; where decoding takes twice as long, half as fast is as narrow.
LOSSY = f"tbf rate {384 / slowness():.0f}kbit burst 1600 limit 3200"

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.skipif(
        not Path("/proc/self/schedstat").exists(), reason="this system does not tell who waits for a core"
    ),
]


@pytest.fixture(autouse=True)
def idle_machine() -> None:
    usage = CpuUsage()
    time.sleep(2.0)
    if usage.busy() > 0.3:
        pytest.skip(f"the cores of this machine are {usage.busy():.0%} busy with something else")


@contextlib.contextmanager
def running(folder: Path, **options) -> Iterator[Stack]:
    split = "never" if options.get("num_prefill") == 0 else "always"
    options = {"options": OPTIONS, "gateway_options": ("--split", split), **options}
    with Stack(MODEL, folder, failpoints=True, **options) as stack:
        yield stack


_draw = random.Random(0)


def prompt(num_tokens: int) -> list[int]:
    """One that was never sent before."""
    return [_draw.randrange(300, 4000) for _ in range(num_tokens)]


def request(num_prompt: int = 64, max_tokens: int = 32, **fields) -> inference_pb2.GenerateRequest:
    return make_request(prompt(num_prompt), max_tokens=max_tokens, ignore_eos=True, **fields)


def endless(*args, **fields) -> Iterator[inference_pb2.GenerateRequest]:
    while True:
        yield request(*args, **fields)


def load(
    target: str,
    num_clients: int,
    requests: Iterator[inference_pb2.GenerateRequest],
    seconds: float = SECONDS,
    pause_s: float = 0.0,
    options: tuple = (),
) -> str:
    """Send requests, `num_clients` at a time, for `seconds` or until there are no more; read a message in `pause_s`.
    The sentence."""
    until, turn = time.monotonic() + seconds, threading.Lock()

    def work(stub: inference_pb2_grpc.InferenceStub) -> None:
        while time.monotonic() < until:
            with turn:
                request = next(requests, None)
            if request is None:
                return
            for _ in stub.Generate(request, timeout=patience(60)):
                time.sleep(pause_s)

    with grpc.insecure_channel(target, options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        threads = [threading.Thread(target=work, args=(stub,)) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sentence(target)


def sentence(target: str) -> str:
    with grpc.insecure_channel(target) as channel:
        return fleet_pb2_grpc.FleetStub(channel).ListRequests(fleet_pb2.ListRequestsRequest(), timeout=10).bound


@contextlib.contextmanager
def neighbours(num: int) -> Iterator[None]:
    """Processes that never stop, in sessions of their own, among which the kernel may divide cores first."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin, start_new_session=True) for _ in range(num)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def throttled(process: Process, share: float) -> Iterator[None]:
    """A CPU limit as containers have it."""
    group = CGROUP / f"baton-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(1e5 * share)))
        (group / "cgroup.procs").write_text(str(process.pid))
    except OSError as error:
        pytest.skip(f"no group of processes with a CPU limit can be made here: {error}")
    try:
        yield
    finally:
        (CGROUP / "cgroup.procs").write_text(str(process.pid))
        group.rmdir()


@contextlib.contextmanager
def blocked(process: Process) -> Iterator[None]:
    """Halted again and again for a fifth of a second, as by a call that does not return: it neither runs nor waits."""
    stop = threading.Event()

    def halt() -> None:
        while not stop.wait(0.03):
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=halt)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_throttled_core(tmp_path):
    with running(tmp_path, num_prefill=0) as stack, throttled(stack.decode[0], 0.2):
        assert load(stack.target, 4, endless()).startswith("Bound by cores")


def test_busy_neighbours_on_all_cores(tmp_path):
    with running(tmp_path, num_prefill=0) as stack, neighbours(6 * len(os.sched_getaffinity(0))):
        said = load(stack.target, 4, endless())
        assert said.startswith("Bound by cores"), said


def test_slow_clients(tmp_path):
    with running(tmp_path, num_prefill=0) as stack:
        said = load(stack.target, 2, endless(max_tokens=600, logprobs=20), pause_s=0.2, options=NARROW)
        assert said.startswith("Bound by client: answers wait"), said


def test_an_event_loop_that_is_blocked(tmp_path):
    with running(tmp_path, num_prefill=0) as stack, blocked(stack.gateways[0]):
        assert load(stack.target, 2, endless()).startswith("Bound by gateway")


def test_a_pool_that_is_too_small(tmp_path):
    with running(tmp_path, num_prefill=0, options=("--num-blocks", "40", "--threads", "1")) as stack:
        said = load(stack.target, 12, endless(200, 60))
        assert said.startswith("Bound by kv pool"), said


def test_a_queue_for_the_prefill_worker(tmp_path):
    with running(tmp_path) as stack, stack.prefill[0].armed("engine.step=sleep:0.1"):
        said = load(stack.target, 12, endless(300, 2))
        assert said.startswith("Bound by prefill queue"), said


def test_a_queue_for_the_decode_worker(tmp_path):
    options = (*OPTIONS, "--max-num-seqs", "1")
    with running(tmp_path, num_prefill=0, options=options) as stack, stack.armed("engine.step=sleep:0.02"):
        said = load(stack.target, 8, endless(32, 8))
        assert said.startswith("Bound by decode queue"), said


def test_long_prompts(tmp_path):
    with running(tmp_path) as stack, stack.prefill[0].armed("engine.step=sleep:0.3"):
        said = load(stack.target, 1, endless(1500, 2))
        assert said.startswith("Bound by prefill compute") and "prompts are long" in said, said


def test_a_slow_link_for_kv(tmp_path):
    options = (*OPTIONS, "--transports", "tcp")
    with running(tmp_path, options=options) as stack, stack.decode[0].armed("transfer.landed=sleep:0.3"):
        said = load(stack.target, 1, endless(600, 4))
        assert said.startswith("Bound by transfer"), said


def test_a_cold_cache_after_a_restart(tmp_path):
    """Turns of conversations, of which all but the last words were found, and have to be read again."""
    conversations = [prompt(900) for _ in range(60)]

    def turns() -> Iterator[inference_pb2.GenerateRequest]:
        return (make_request(begun + prompt(30), max_tokens=2, ignore_eos=True) for begun in conversations)

    options = ("--num-blocks", "2000", "--threads", "1")
    with running(tmp_path, num_prefill=0, options=options) as stack:
        for _ in range(3):
            load(stack.target, 1, turns(), seconds=patience(60))
        stack.decode[0].kill()
        stack.restart(stack.decode[0])
        said = load(stack.target, 1, turns(), seconds=patience(60))
        assert said.startswith("Bound by prefill compute") and "cold cache" in said, said


def test_a_gateway_at_its_limit():
    """It has one core, a worker that computes nothing and the clients have the other: answers of two tokens, of which a
    request costs the gateway the most."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a core for the gateway and one for the rest")
    with fleet(step_ms=1) as made:
        seen(clients(made.targets, "closed", 48, SECONDS, 2))
        said = sentence(made.targets[0])
        assert said.startswith("Bound by gateway"), said


def script(folder: Path) -> str:
    """A gateway here, a worker there, and a link between them that drops packets."""
    baton = f"{sys.executable} -m"
    worker = f"{baton} decode_worker --model {MODEL} --num-blocks 400 --threads 1 --insecure"
    return f"""
{MAKE_TWO_HOSTS}
{ON_OTHER} {worker} --listen 10.0.0.2:7000 > {folder}/worker 2>&1 & worker=$!
until grep -q ^ready {folder}/worker; do kill -0 $worker; sleep 0.2; done
{baton} gateway --model {MODEL} --listen 127.0.0.1:7001 --decode-workers 10.0.0.2:7000 > {folder}/gateway 2>&1 & gateway=$!
until grep -q ^ready {folder}/gateway; do kill -0 $gateway; sleep 0.2; done
{ON_OTHER} tc qdisc add dev there root {LOSSY}
{baton} tests.e2e.observe.test_diagnosis 127.0.0.1:7001
"""


def test_lost_packets_between_hosts(tmp_path):
    done = subprocess.run(
        [*ALONE, "bash", "-c", script(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=patience(120), env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    logs = "".join(path.read_text() for path in tmp_path.iterdir())
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    assert done.stdout.startswith("Bound by network"), done.stdout


if __name__ == "__main__":
    print(load(sys.argv[1], 8, endless(16, 64), seconds=12))
