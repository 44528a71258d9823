"""`baton doctor` on a healthy stack, and on broken ones: each fault found by name, with the one thing to do."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest

from baton.cli.cluster import doctor as doctor_command
from baton.cli.cluster.findings import Findings, check_collector
from baton.cli.cluster.handover import Handover
from baton.service.security.access import Access
from baton.v1 import fleet_pb2, fleet_pb2_grpc, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from tests.support.models import make_model
from tests.support.process import children
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack

NOBODY = "127.0.0.1:9"


def doctor(*arguments: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "baton.cli.main", "doctor", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def fault(output: str) -> str:
    """The one warning."""
    (line,) = [line for line in output.splitlines() if line.lstrip().startswith("WARN")]
    return line


@pytest.fixture(scope="module")
def loose(fork_server, model, tmp_path_factory):
    """Workers without a gateway: shared memory only, network only, and another model."""
    folder = tmp_path_factory.mktemp("loose")
    options = ("--num-blocks", "160", "--threads", "1")
    other = make_model(folder / "other", seed=7)
    plans = {
        "shm": Stack(
            model,
            folder / "shm",
            num_decode=0,
            num_gateways=0,
            options=(*options, "--transports", "shm"),
            fork_server=fork_server,
        ),
        "tcp": Stack(
            model,
            folder / "tcp",
            num_prefill=0,
            num_gateways=0,
            options=(*options, "--transports", "tcp"),
            fork_server=fork_server,
        ),
        "other": Stack(
            other, folder / "other-logs", num_prefill=0, num_gateways=0, options=options, fork_server=fork_server
        ),
    }
    for stack in plans.values():
        stack.__enter__()
    yield {name: stack.address[stack.workers[0].name] for name, stack in plans.items()}
    for stack in plans.values():
        stack.stop()


def test_a_healthy_stack(stack, receiver):
    status, output = doctor("--target", stack.target, "--collector", f"{receiver.endpoint}/v1/traces")
    assert status == 0 and output.endswith("a request works\n"), output
    for part in ("gateway", "collector", "prefill", "decode", "layouts", "handoff", "request"):
        assert any(line.split()[:2] == ["ok", part] for line in output.splitlines()), (part, output)
    assert "shm" in output and "GB/s" in output and "chosen" in output
    assert "clock" in output and "prefix cache on" in output and "attention" in output


def test_the_doctor_draws_a_worker_of_several_processes(fork_server, model, tmp_path):
    """And says how fast they add, where they do."""
    options = {"fork_server": fork_server, "num_gateways": 0, "options": ("--num-blocks", "160", "--threads", "1")}
    options |= {"prefill_options": ("--tensor-parallel", "2", "--pipeline-parallel", "2")}
    with Stack(model, tmp_path, decode_options=("--pipeline-parallel", "2"), **options) as stack:
        prefill, decode = (stack.address[name] for name in ("prefill0", "decode0"))
        status, output = doctor("--prefill-workers", prefill, "--decode-workers", decode)
        pids = {str(worker.pid): children(worker.pid) for worker in stack.workers}
    assert status == 0, output
    drawn = [line.split(maxsplit=3) for line in output.splitlines() if line.split()[:2] == ["ok", "ranks"]]
    of_prefill, of_decode = ([line for _, _, where, line in drawn if where == address] for address in (prefill, decode))
    assert [line[:8] for line in (*of_prefill, *of_decode)] == [
        "stage 0:",
        "stage 1:",
        "a sum of",
        "stage 0:",
        "stage 1:",
    ]
    assert [line.count("|") for line in (*of_prefill[:2], *of_decode)] == [1, 1, 0, 0]
    named = re.findall(r"pid (\d+)", " ".join((*of_prefill, *of_decode)))
    assert named == [pid for leader, others in pids.items() for pid in (leader, *map(str, sorted(others)))]
    assert "us, of a step" in of_prefill[2] and "of its host's copy" in of_prefill[2]


def test_the_blocks_it_moved_come_back(stack, probes):
    assert doctor("--target", stack.target)[0] == 0
    for probe in probes.values():
        probe.wait_idle()


def test_nobody_at_the_door():
    status, output = doctor("--target", NOBODY)
    assert status == 1
    assert "no gateway answers there: start it, or correct --target" in output
    assert "FAIL  request" in output and "a request does not work; 2 warnings" in output


def test_a_worker_that_is_not_there(loose):
    status, output = doctor("--prefill-workers", NOBODY, "--decode-workers", loose["tcp"])
    assert status == 1
    assert "no prefill worker answers there: start it, or correct --prefill-workers" in fault(output)


def test_a_worker_that_the_gateway_does_not_know(stack, loose):
    """It is held against those of the gateway, and asked to take a prompt from them."""
    status, output = doctor("--target", stack.target, "--decode-workers", f"{loose['tcp']},{loose['other']}")
    assert status == 0
    warned = [line for line in output.splitlines() if "serves another model" in line]
    assert len(warned) == 1 and loose["other"] in warned[0], output
    assert re.search(rf"handoff +\S+ > {loose['tcp']} ", output), output


def test_an_address_of_something_else(stack, loose):
    status, output = doctor("--prefill-workers", stack.target, "--decode-workers", loose["tcp"])
    assert status == 1
    assert "something else than a prefill worker answers there: correct --prefill-workers" in fault(output)


def test_a_worker_in_the_wrong_list(loose):
    status, output = doctor("--prefill-workers", loose["shm"], "--decode-workers", f"{loose['tcp']},{loose['shm']}")
    assert status == 1
    assert "is a prefill worker: take it out of --decode-workers" in output


def test_no_transport_in_common(loose):
    status, output = doctor("--prefill-workers", loose["shm"], "--decode-workers", loose["tcp"])
    assert status == 1
    assert "no transport between taker and source" in fault(output)
    assert "give both workers a transport in common (--transports)" in fault(output)


def test_doctor_names_a_worker_with_another_model(loose):
    status, output = doctor("--prefill-workers", loose["shm"], "--decode-workers", loose["other"])
    assert status == 1
    assert "serves another model (config or weights) than" in output
    assert "start all with the same --model" in output


def test_a_request_works_without_redis_and_collector(stack):
    status, output = doctor("--target", stack.target, "--redis", f"redis://{NOBODY}", "--collector", f"http://{NOBODY}")
    assert status == 0 and output.endswith("a request works; 2 warnings\n")
    warnings = [line for line in output.splitlines() if "WARN" in line]
    assert len(warnings) == 2 and "redis" in warnings[0] and "collector" in warnings[1], output


async def test_a_collector_is_reached_as_exporters_reach_it(receiver, monkeypatch):
    """By the proxy that the environment names, unless that leaves this host out."""
    report = Findings(is_json=True)
    for no_proxy in ("", "127.0.0.1"):
        monkeypatch.setenv("http_proxy", f"http://{NOBODY}")
        monkeypatch.setenv("no_proxy", no_proxy)
        await check_collector(receiver.endpoint, report)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await check_collector(f"http://127.0.0.1:{silent.getsockname()[1]}", report)
    await check_collector("http://collector", report)
    assert [one.status for one in report.found] == ["warning", "ok", "warning", "warning"]
    assert NOBODY in report.found[0].text and "no_proxy" in report.found[0].advice
    assert [one.text for one in report.found[1:3]] == ["accepts connections from here", "no answer"]


def test_a_redis_that_wants_a_password_answers(tmp_path):
    """A gateway tells its URL without the password; in --redis it belongs there."""
    report = Findings(is_json=True)
    with RedisServer(tmp_path) as server:
        server.client.config_set("requirepass", "sesame")
        for is_whole in (False, True):
            asyncio.run(doctor_command._redis(server.url, is_whole, report))
    assert [one.status for one in report.found] == ["ok", "warning"]
    assert "answers" in report.found[0].text and "uthenticat" in report.found[1].text


@pytest.mark.parametrize("url", [f"redis://name:secret@{NOBODY}", f"redis://name:secret/@{NOBODY}"])
async def test_no_password_is_shown(capsys, url):
    await doctor_command._redis(url, True, Findings())
    shown = capsys.readouterr().out
    assert "WARN" in shown and "secret" not in shown


def test_one_document(stack):
    status, output = doctor("--target", stack.target, "--redis", f"redis://{NOBODY}", "--json")
    found = json.loads(output)
    assert status == 0 and found["request_works"] is True
    assert [one["part"] for one in found["checks"] if one["status"] == "warning"] == ["redis"]
    assert all(one["advice"] for one in found["checks"] if one["status"] == "warning")
    assert json.loads(doctor("--target", NOBODY, "--json")[1])["request_works"] is False


def test_a_prefill_slower_than_the_lease_is_no_fault(fork_server, model, tmp_path):
    """A whole context takes longer to read than its KV would be kept; the prompts that are sent do not."""
    slow = ("--max-num-batched-tokens", "80", "--max-num-seqs", "16", "--lease-ttl-s", "2")
    options = {
        "prefill_options": slow,
        "options": ("--num-blocks", "160", "--threads", "1"),
        "failpoints": True,
        "fork_server": fork_server,
    }
    with Stack(model, tmp_path, **options) as stack:
        stack.prefill[0].arm("engine.step=sleep:0.2")
        status, output = doctor("--target", stack.target)
    assert status == 0 and "WARN" not in output, output


class Silent(worker_pb2_grpc.WorkerServicer):
    """Describes itself, but sends no Hello."""

    def __init__(self, ahead_s: int = 0):
        self.over, self._ahead_s = threading.Event(), ahead_s

    def Describe(self, request, context):
        wall_time_ns = time.time_ns() + self._ahead_s * 10**9
        return pb.Hello(roles=["prefill", "decode"], epoch=1, wall_time_ns=wall_time_ns)

    def Session(self, request_iterator, context):
        self.over.wait(60)
        return iter(())


class Faltering(Silent):
    """Says Hello, and at the first Admit closes the session, or stalls."""

    def __init__(self, stalls: bool):
        super().__init__()
        self._stalls = stalls

    def Session(self, request_iterator, context):
        next(request_iterator)
        card, limits = pb.ModelCard(vocab_size=9), pb.Limits(block_size=16, max_model_len=99)
        yield pb.Event(hello=pb.Hello(roles=["prefill", "decode"], epoch=1, model=card, limits=limits))
        next(request_iterator)
        if self._stalls:
            self.over.wait(60)


@contextmanager
def served(worker: Silent):
    server = grpc.server(ThreadPoolExecutor(4))
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        worker.over.set()
        server.stop(0)


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (Silent(), "opens a session but does not answer its Hello"),
        (Faltering(stalls=False), "closed the session"),
        (Faltering(stalls=True), "no end within 6 s"),
    ],
    ids=["silent", "closes", "stalls"],
)
def test_a_worker_that_falters_is_a_finding(worker, why):
    with served(worker) as address:
        status, output = doctor("--prefill-workers", address, "--decode-workers", address)
    assert status == 1
    assert f"{address} > {address}" in fault(output) and why in fault(output)


@pytest.mark.parametrize("stalls", [False, True])
def test_a_transport_that_falters_leaves_the_next_to_be_tried(stalls, monkeypatch):
    monkeypatch.setattr(doctor_command, "_HANDOFF_S", 1.0)
    report = Findings(is_json=True)

    async def try_two(address: str) -> None:
        proof = Handover("shm", 33, 1, 1.0, 1.0, ())
        async with doctor_command._Channels(Access()) as channels:
            for name in ("grpc", "tcp"):
                await doctor_command._try(channels, address, address, name, proof, 1e9, report)

    with served(Faltering(stalls)) as address:
        asyncio.run(try_two(address))
    why = "no end within 1 s" if stalls else f"{address} closed the session"
    assert [(one.status, one.text) for one in report.found] == [("note", f"grpc: {why}"), ("note", f"tcp: {why}")]


@pytest.mark.parametrize("wrong", ["nowhere", "host:port", "127.0.0.1:99999"])
def test_wrong_addresses_exit_2_and_are_named(wrong):
    argv = [sys.executable, "-m", "baton.cli.main", "doctor", "--decode-workers", wrong]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and wrong in done.stderr


class Fleet(fleet_pb2_grpc.FleetServicer):
    """A gateway with one worker, as it sees it."""

    def __init__(self, **view):
        self._view = fleet_pb2.WorkerView(role="decode", **view)

    def ListWorkers(self, request, context):
        return fleet_pb2.ListWorkersResponse(workers=[self._view])


@pytest.mark.parametrize(
    ("view", "told"),
    [
        ({"state": "connecting", "reason": "no route to host"}, "it cannot reach, no route to host: look at names"),
        ({"state": "stalled"}, "which has work and does not step: look into its log"),
        ({"state": "serving", "breaker": "open"}, "which left requests without an answer: look into its log"),
        ({"state": "serving", "breaker": "closed"}, ""),
    ],
    ids=["connecting", "stalled", "set aside", "used"],
)
async def test_a_worker_that_answers_here_and_is_not_used_there(capsys, view, told):
    with served(Silent()) as worker:
        server = grpc.server(ThreadPoolExecutor(1))
        fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(address=worker, **view), server)
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        args = SimpleNamespace(target=target, prefill_workers=[], decode_workers=[], redis="", collector="")
        await doctor_command._examine(args, Access(), Findings())
        server.stop(0)
    warned = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("WARN")]
    assert len(warned) == bool(told) and all(f"does not use {worker}, " in line and told in line for line in warned)


async def test_a_worker_that_was_taken_away_is_no_warning(capsys):
    """As by `baton scale prefill=0`: nobody is to start it."""
    server = grpc.server(ThreadPoolExecutor(1))
    fleet_pb2_grpc.add_FleetServicer_to_server(Fleet(address="127.0.0.1:9", state="left", reason="it drained"), server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    found, report = doctor_command.Found(), Findings()
    await doctor_command._gateway(target, Access(), found, report)
    server.stop(0)
    assert [(one.status, one.text) for one in report.found] == [
        ("ok", "ready, 0 workers"),
        ("note", "127.0.0.1:9 has not come back: it drained"),
    ]
    assert not found.decode and not found.unused


def test_workers_of_two_builds_are_told_as_such():
    """Their blocks are alike: nothing is converted."""
    report, hello = Findings(is_json=True), pb.Hello(numerics_class="a", limits=pb.Limits(block_size=32))
    hello.layout.groups.add(kind="paged", num_layers=2, num_kv_heads=2, head_dim=16, form="bf16", block_size=32)
    other, larger = pb.Hello(), pb.Hello()
    for each in (other, larger):
        each.CopyFrom(hello)
        each.numerics_class = "b"
    larger.layout.groups[0].block_size = larger.limits.block_size = 64
    for each in (hello, other, larger):
        doctor_command._layouts(hello, each, "a > b", report)
    blocks = "2 layers x 2 heads x 16 bf16, blocks of "
    assert [(each.status, each.text) for each in report.found] == [
        ("ok", f"equal: {blocks}32"),
        ("note", f"equal, but of other kernels or another build: {blocks}32"),
        ("note", f"{blocks}32 is converted to {blocks}64"),
    ]


@pytest.mark.parametrize(
    ("ahead_s", "told"),
    [
        (0, ""),
        (3600, "its clock is 3,600 s ahead of this host's: set"),
        (-60, "its clock is 60 s behind this host's: set"),
    ],
)
async def test_a_clock_that_is_off_is_a_warning(capsys, ahead_s, told):
    with served(Silent(ahead_s)) as worker:
        async with doctor_command._Channels(Access()) as channels:
            report = Findings()
            hellos = await doctor_command._workers(channels, doctor_command.Found(decode=[worker]), report)
    said = capsys.readouterr().out
    assert [*hellos] == [worker] and [each.status for each in report.found] == ["warning" if told else "ok"]
    assert (told or "; clock ") in said and ("NTP" in said) == bool(told)
