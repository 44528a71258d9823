"""Stages that join from another host, here by way of this one's network: the bits of one process, and one line for all
that does not fit."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest

import baton
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import instruction_set
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.kv.pool import CPU
from baton.engine.models.loader import model_identity
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.stage import PipelineStage
from baton.engine.ranks.build_digest import CODE, build_digest
from baton.engine.ranks.process import Assignment
from baton.service.net.client import open_channel
from baton.service.net.server import ListenError
from baton.service.security.access import Access
from baton.service.security.tls import WORKER_NAME
from baton.worker.ranks.listener import RankListener
from baton.worker.ranks.rank import NotJoined, RankSettings, _load, serve_rank
from baton.worker.ranks.stream import PATH
from baton.worker.settings import WorkerSettings
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.models import TINY, make_model
from tests.support.native.ranks_in_threads import depths_of
from tests.support.pace import patience
from tests.support.process import Process
from tests.support.security.installation import install

PROMPTS = [list(range(5, 5 + length)) for length in (3, 200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "deep", replace(TINY, num_layers=4))


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return install(tmp_path_factory.mktemp("certs") / "certs")


@pytest.fixture
async def listen():
    """Start listeners for one rank; they stop in the end, also of a test that fails: what still listens when its loop
    is gone was an error in whichever test came later."""
    listeners = []

    async def listen(tls=None) -> RankListener:
        listeners.append(RankListener("127.0.0.1:0", tls, 1))
        await listeners[-1].start()
        return listeners[-1]

    yield listen
    for listener in listeners:
        await listener.stop()


def config_of(model, **options) -> EngineConfig:
    return EngineConfig(model, threads=1, num_blocks=64, **options)


def answers(engine: Engine) -> dict:
    """Two choices too, the second of which copies a block; beside so many that each stage has a step."""
    requests = [engine_request(str(len(ids)), ids, 16) for ids in PROMPTS]
    requests.append(engine_request("two", PROMPTS[1], 16, temperature=1.0, seed=3, n=2))
    requests += [engine_request(f"many{index}", [5 + index] * 6, 16) for index in range(24)]
    return {key: record.answer() for key, record in run_to_end(engine, requests).items()}


def given_to_a_rank(config: EngineConfig, model, build: str | None = None) -> Assignment:
    """`build`: of the worker, as it says; this one's unless it is given."""
    build = build_digest() if build is None else build
    return Assignment(config, stage=PipelineStage(1, range(2, 4)), identity=model_identity(model).hex(), build=build)


@contextmanager
def started(fork_server, folder, name: str, model, address: str, certs=None, role: str = "rank") -> Iterator[Process]:
    shown = ()
    if certs is not None:
        shown = tuple(
            f"--tls-{kind}={certs.folder / file}"
            for kind, file in (("ca", "ca.crt"), ("cert", f"{role}.crt"), ("key", f"{role}.key"))
        )
    program = [
        sys.executable,
        "-m",
        "baton.cli",
        "rank",
        "--leader",
        address,
        "--model",
        str(model),
        "--threads",
        "1",
        *shown,
    ]
    process = fork_server.process(name, program, folder)
    try:
        yield process
    finally:
        process.popen.kill()
        process.wait()


async def test_stages_of_other_hosts_give_the_answers_of_one_process(listen, fork_server, model, certs, tmp_path):
    """One stage here, one of this host, one that joins with its certificate; then the worker ends, and so does its
    rank."""
    expected = answers(Engine.load(config_of(model)))

    listener = await listen(certs.tls("decode"))
    config = config_of(model, pipeline_parallel=3, remote_stages=1)
    with started(fork_server, tmp_path, "rank", model, listener.address, certs) as rank:
        engine = await asyncio.to_thread(Engine.load, config, joining=listener)
        depths = depths_of(engine)
        assert await asyncio.to_thread(answers, engine) == expected and max(depths) == 2
        assert [len(engine.ranks.pids), len(engine.ranks.num_bytes)] == [1, 2]
        await asyncio.to_thread(engine.ranks.close)
        assert await asyncio.to_thread(rank.wait) == 1, rank.text()
        assert f"the worker at {listener.address} has ended, or its connection" in rank.text()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, ("has closed its connection",)),
        # gRPC's keepalive ends the connection after as long: on a busy machine it may come first.
        (signal.SIGSTOP, ("was not heard for 5.0 s", "has closed its connection")),
    ],
    ids=["killed", "stopped"],
)
async def test_a_lost_rank_of_another_host_ends_every_wait(listen, fork_server, model, tmp_path, how, said):
    listener = await listen()
    reasons = []
    with started(fork_server, tmp_path, "rank", model, listener.address) as rank:
        config = config_of(model, pipeline_parallel=2, remote_stages=1)
        engine = await asyncio.to_thread(Engine.load, config, joining=listener)
        engine.ranks.when_lost(reasons.append)
        engine.submit(engine_request("a", PROMPTS[1], 800))
        await asyncio.to_thread(engine.step)
        await asyncio.sleep(0.3)  # it has been heard
        os.kill(rank.pid, how)
        with pytest.raises(RankLost):
            while True:
                await asyncio.to_thread(engine.step)
        await asyncio.to_thread(engine.ranks._watcher.join, patience(10))
        (reason,) = reasons
        assert reason.startswith("rank 1 (ipv4:127.0.0.1:") and reason.endswith(said)
        await asyncio.to_thread(engine.ranks.close)


async def test_a_rank_that_never_joins(listen, model, monkeypatch):
    monkeypatch.setattr("baton.engine.ranks.spawn.START_S", 0.5)

    listener = await listen()
    config = config_of(model, pipeline_parallel=2, remote_stages=1)
    told = (
        f"^rank 1 has not joined 0 s after the start: `baton rank --leader {listener.address} --model DIR` starts it$"
    )
    with pytest.raises(ValueError, match=told):
        await asyncio.to_thread(Engine.load, config, joining=listener)


async def test_what_does_not_fit_is_refused_on_both_sides(listen, fork_server, model, certs, tmp_path):
    """Another version, other instructions, nonsense and another role take no place; another model ends both."""
    other = make_model(tmp_path / "other", replace(TINY, num_layers=4), seed=1)
    own = {"version": baton.__version__, "build": build_digest(), "instructions": instruction_set(CPU)}

    async def told(listener: RankListener, hello: bytes) -> dict:
        async with open_channel(listener.address, certs.access("rank"), WORKER_NAME) as channel:
            call = channel.stream_stream(PATH)()
            await call.write(hello)
            return json.loads(await call.read())

    listener = await listen(certs.tls("decode"))
    for hello, why in (
        (json.dumps(own | {"version": "0.0.1"}).encode(), f"it runs baton 0.0.1, the worker {baton.__version__}"),
        (
            json.dumps(own | {"build": "0"}).encode(),
            f"it runs another build of baton {baton.__version__} than the worker: ",
        ),
        (json.dumps({key: own[key] for key in ("version", "instructions")}).encode(), "it runs another build of baton"),
        (json.dumps(own | {"instructions": "none"}).encode(), "it computes with none, the worker with"),
        (b"\xff", "this is no rank's first message"),
        (b"[]", "this is no rank's first message"),
    ):
        assert why in (await told(listener, hello))["refused"]
    for access, what in ((certs.access("gateway"), "PERMISSION_DENIED"), (Access(), "UNAVAILABLE")):
        async with open_channel(listener.address, access, WORKER_NAME) as channel:
            call = channel.stream_stream(PATH)()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.write(b"{}")
                await call.read()
            assert refused.value.code().name == what
    config = config_of(model, pipeline_parallel=2, remote_stages=1)
    with started(fork_server, tmp_path, "other", other, listener.address, certs) as rank:
        with pytest.raises(ValueError, match=f"^rank 1: {other}: is model [0-9a-f]{{16}}, the worker has "):
            await asyncio.to_thread(Engine.load, config, joining=listener)
        assert await asyncio.to_thread(rank.wait) == 2
        assert f"baton rank: {other}: is model" in rank.text()
    with started(fork_server, tmp_path, "second", model, listener.address, certs) as rank:
        assert await asyncio.to_thread(rank.wait) == 1, rank.text()
        assert "the worker has all its 1 ranks of other hosts; is this one started twice?" in rank.text()


@pytest.mark.parametrize("build", ["", "0"], ids=["one that does not say its build", "another"])
async def test_a_worker_of_another_build_gets_no_rank(listen, model, build):
    """What is said among ranks changes between two releases: a build behind one change of it, whose number was the
    same, joined, and each request whose KV came from another worker stood still until its deadline."""
    listener = await listen()
    config = config_of(model, dtype="fp32", kv_dtype="fp32", pipeline_parallel=2, remote_stages=1)
    serving = asyncio.create_task(serve_rank(RankSettings(listener.address, model), asyncio.Event()))
    joined = await asyncio.to_thread(listener.place, given_to_a_rank(config, model, build))
    told = f"the worker runs another build of baton {baton.__version__}: install one on both hosts"
    with pytest.raises(ValueError, match=f"^{told}$"):
        await serving
    assert await asyncio.to_thread(joined.next_message, time.monotonic() + patience(10)) == {"error": told}


def test_a_build_is_its_code(tmp_path):
    """Of python and of kernels; not what else lies there, nor where it is."""
    for folder in (*CODE, "baton/cli"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "part.py").write_text("a = 1\n")
    digests = [build_digest(tmp_path)]
    for path in ("baton/cli/part.py", "baton/engine/notes.txt", "baton/engine/part.cpp", "baton/gguf.py"):
        (tmp_path / path).write_text("a = 2\n")
        digests.append(build_digest.__wrapped__(tmp_path))
    assert digests[0] == digests[1] == digests[2] and len(set(digests[2:])) == 3


async def test_a_rank_that_leaves_before_it_has_a_place_takes_none(listen, monkeypatch):
    waiting = asyncio.Event()
    refusal = RankListener._refusal

    def accepted(listener: RankListener, hello: bytes) -> str:
        waiting.set()
        return refusal(listener, hello)

    monkeypatch.setattr(RankListener, "_refusal", accepted)
    listener = await listen()
    own = {"version": baton.__version__, "build": build_digest(), "instructions": instruction_set(CPU)}
    hello = json.dumps(own).encode()
    async with open_channel(listener.address, Access(), WORKER_NAME) as channel, asyncio.timeout(patience(10)):
        left = channel.stream_stream(PATH)()
        await left.write(hello)
        await waiting.wait()
        left.cancel()
        while not listener._num_free:
            await asyncio.sleep(0.01)
        joined = channel.stream_stream(PATH)()
        await joined.write(hello)
        given = Assignment(EngineConfig(Path("model")))
        await asyncio.to_thread(listener.place, given)
        assert await joined.read() == given.line().encode()
        joined.cancel()


@pytest.mark.parametrize("fails", [False, True], ids=["is read", "cannot be read"])
async def test_a_worker_that_ends_while_its_rank_reads_the_model(listen, model, monkeypatch, fails):
    """One line says why the rank ends."""
    listener = await listen()
    begun, is_over = threading.Event(), threading.Event()

    def load_late(*args):
        begun.set()
        assert is_over.wait(patience(10))
        if fails:
            raise ModelError("its files are gone")
        return _load(*args)

    monkeypatch.setattr("baton.worker.ranks.rank._load", load_late)
    serving = asyncio.create_task(serve_rank(RankSettings(listener.address, model), asyncio.Event()))
    config = config_of(model, dtype="fp32", kv_dtype="fp32", pipeline_parallel=2, remote_stages=1)
    given = given_to_a_rank(config, model)
    joined = await asyncio.to_thread(listener.place, given)
    assert await asyncio.to_thread(begun.wait, patience(10))
    await listener.stop()
    while not joined.ended():
        await asyncio.sleep(0.01)
    is_over.set()
    told = "its files are gone" if fails else f"the worker at {listener.address} has ended, or its connection"
    with pytest.raises(ModelError if fails else NotJoined, match=told):
        await serving


async def test_a_rank_without_a_worker(model, monkeypatch):
    monkeypatch.setattr("baton.worker.ranks.rank.CONNECT_S", 0.2)
    with pytest.raises(NotJoined, match="^nothing listens at 127.0.0.1:9: "):
        await serve_rank(RankSettings("127.0.0.1:9", model), asyncio.Event())


async def test_a_rank_that_is_told_to_end_waits_for_no_worker(model, monkeypatch):
    monkeypatch.setattr("baton.worker.ranks.rank.CONNECT_S", 10 * patience(10))
    stop, has_read = asyncio.Event(), asyncio.Event()

    async def read(reading):
        has_read.set()
        return reading()

    monkeypatch.setattr("baton.worker.ranks.rank._read", read)
    serving = asyncio.create_task(serve_rank(RankSettings("127.0.0.1:9", model), stop))
    await has_read.wait()
    await asyncio.wait([serving], timeout=0.5)
    stop.set()
    async with asyncio.timeout(patience(10)):
        await serving


READS_FOR_LONG = """
import sys, time
from baton.cli.main import main
from baton.worker.ranks import rank

def read(*args):
    print("reading", flush=True)
    time.sleep(3600)

setattr(rank, sys.argv.pop(1), read)
sys.exit(main())
"""


@pytest.mark.parametrize("what", ["model_identity", "_load"])
async def test_a_rank_that_is_told_to_end_does_not_read_its_model_to_the_end(listen, model, tmp_path, what):
    """Every byte is hashed, and its layers read: one of 12 GiB was deaf for 71 s."""
    listener = await listen()
    argv = [sys.executable, "-c", READS_FOR_LONG, what, "rank", "--leader", listener.address, "--model", str(model)]
    rank = Process("rank", argv, tmp_path)
    try:
        if what == "_load":
            config = config_of(model, dtype="fp32", kv_dtype="fp32", pipeline_parallel=2, remote_stages=1)
            await asyncio.to_thread(listener.place, given_to_a_rank(config, model))
        async with asyncio.timeout(patience(60)):
            while "reading" not in rank.out.read_text():
                await asyncio.sleep(0.05)
        rank.terminate()
        assert await asyncio.to_thread(rank.wait, 20) == 0, rank.text()
        assert "told to end before its model was loaded" in rank.text()
    finally:
        rank.kill()


def waiting(model, folder: Path, *options: str) -> Process:
    """Return a worker that has not read its model yet, and waits for a rank."""
    flags = "--listen 127.0.0.1:0 --threads 1 --num-blocks 64 --pipeline-parallel 2 --remote-stages 1 --rank-listen 127.0.0.1:0"
    command = [sys.executable, "-m", "decode_worker", "--model", str(model), *flags.split(), *options]
    worker = Process("worker", command, folder)
    deadline = time.monotonic() + patience(60)
    while "waits for 1 ranks" not in worker.text() and time.monotonic() < deadline:
        time.sleep(0.05)
    return worker


def test_a_worker_answers_its_operators_before_it_has_read_its_model(model, tmp_path):
    """That takes half an hour where it is large, and who does not answer for a minute is down."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    worker = waiting(model, tmp_path, "--admin", f"127.0.0.1:{port}")

    def get(path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=patience(10)) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    try:
        assert get("/healthz")[0] == 200
        status, said = get("/readyz")
        assert status == 503 and json.loads(said) == {"ready": False, "state": "starting"}
        status, page = get("/metrics")
        assert status == 200 and re.search(r'^baton_python_blocks\{model_name="deep"\} ', page, re.MULTILINE)
        assert "baton_kv_blocks" not in page
    finally:
        assert worker.stop() == 0, worker.text()


def test_a_worker_that_is_told_to_end_waits_for_no_rank(model, tmp_path):
    """It would for ten minutes; what reads a large model is as deaf."""
    worker = waiting(model, tmp_path)
    worker.terminate()
    assert worker.wait(20) == 0
    assert "told to end before its model was loaded" in worker.text()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"remote_stages": 1},
            "remote_stages 1: with pipeline_parallel 1 0 to 0: the first stage is the worker itself",
        ),
        (
            {"pipeline_parallel": 2, "remote_stages": 2},
            "remote_stages 2: with pipeline_parallel 2 0 to 1: the first stage",
        ),
        ({"pipeline_parallel": 2, "remote_stages": 1}, "--remote-stages 1: say by --rank-listen where they join"),
        ({"rank_listen": "127.0.0.1:0"}, "--rank-listen has no effect without --remote-stages; leave it out"),
        (
            {"pipeline_parallel": 2, "remote_stages": 1, "rank_listen": "0.0.0.0:0"},
            "--rank-listen 0.0.0.0:0: beyond loopback this needs --tls-cert, --tls-key and --tls-ca",
        ),
    ],
    ids=str,
)
def test_settings_that_have_no_effect_are_refused(model, given, why):
    engine = {name: value for name, value in given.items() if name != "rank_listen"}
    with pytest.raises(ValueError, match=why):
        WorkerSettings(EngineConfig(model, **engine), rank_listen=given.get("rank_listen"))


async def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ListenError, match=f"127.0.0.1:{taken.getsockname()[1]} is in use"):
            RankListener(f"127.0.0.1:{taken.getsockname()[1]}", None, 1)
