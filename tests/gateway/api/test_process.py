"""`python -m gateway` as a process: ready line, admin, memory, draining."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import psutil
import pytest

from tests.support.client import Client
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.pace import patience
from tests.support.process import ROOT, Process

PROMPT = list(range(20, 200))


class Workers:
    """FakeWorkers on an event loop of their own thread."""

    def __init__(self, digest: bytes):
        import asyncio

        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.prefill, self.decode = (self.call(self._start(role, digest)) for role in ("prefill", "decode"))

    @staticmethod
    async def _start(role: str, digest: bytes) -> FakeWorker:
        return await FakeWorker(role, digest, 400).start()

    def call(self, work):
        import asyncio

        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def close(self) -> None:
        for worker in (self.prefill, self.decode):
            self.call(worker.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def workers(digest):
    workers = Workers(digest)
    yield workers
    workers.close()


@pytest.fixture
def gateway(workers, folder, tmp_path):
    argv = [sys.executable, "-m", "gateway", "--model", str(folder), "--listen", "127.0.0.1:0", "--split", "always"]
    argv += ["--prefill-workers", workers.prefill.address, "--decode-workers", workers.decode.address]
    process = Process("gateway", argv, tmp_path)
    yield process
    process.stop()
    assert "Traceback" not in process.text()


@pytest.fixture
def client(gateway):
    client = Client(gateway.ready()["grpc"])
    yield client
    client.close()


def get(address: str, path: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_gateway_process_serves_and_says_so(gateway, client, workers):
    assert client.generate(PROMPT, max_tokens=9).token_ids == tokens_of(PROMPT, 9, 400)
    fields = gateway.ready()
    assert fields["pid"] == str(gateway.pid)
    assert get(fields["admin"], "/healthz")[0] == 200
    status, said = get(fields["admin"], "/readyz")
    assert status == 200 and said["workers"][workers.decode.address]["state"] == "serving"


def test_resident_memory(gateway, client):
    """After some work, with everything loaded that a request needs."""
    for n in (1, 8):
        client.generate("The quick brown fox. " * 20, max_tokens=50, n=n, logprobs=3)
    client.tokenize([("user", "the <|end|> fox")])
    resident = psutil.Process(gateway.pid).memory_info().rss
    assert resident < 120 << 20, f"{resident >> 20} MiB"


def test_a_gateway_process_drains_on_sigterm(gateway, client, workers):
    stream = client.stream(PROMPT, max_tokens=300)
    token_ids = list(next(stream).token_ids)
    gateway.popen.send_signal(signal.SIGTERM)
    for message in stream:
        token_ids += message.token_ids
    assert token_ids == tokens_of(PROMPT, 300, 400)
    assert gateway.wait() == 0


def test_a_gateway_that_is_started_first_waits_for_workers(folder, digest, tmp_path):
    """Started first: it gets ready by itself."""
    import asyncio

    async def start_late() -> None:
        port = reserve()
        argv = [sys.executable, "-m", "gateway", "--model", str(folder), "--listen", "127.0.0.1:0"]
        process = Process("gateway", [*argv, "--decode-workers", f"127.0.0.1:{port}"], tmp_path)
        try:
            await asyncio.sleep(1.0)
            assert "ready" not in process.out.read_text()
            worker = await FakeWorker("decode", digest, 400).start(port)
            await asyncio.to_thread(process.ready)
        finally:
            assert process.stop() == 0
        await worker.stop()

    asyncio.run(start_late())


@pytest.mark.parametrize(
    "flag, value, said",
    [
        ("--slo-classes", "none.toml", " none.toml: No such file or directory"),
        ("--quotas", "none.toml", " none.toml: No such file or directory"),
        ("--quotas", "baton", " baton: Is a directory"),
        (
            "--quotas",
            "pyproject.toml",
            " pyproject.toml: [build-system] requires is not one of tokens_per_s, burst_tokens",
        ),
        ("--redis", "redis://name:sec/ret@h:1/0", ": not a Redis URL, "),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(folder, flag, value, said):
    argv = [sys.executable, "-m", "gateway", "--model", str(folder), "--listen", "127.0.0.1:0", flag, value]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and "name:sec" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith(f"gateway: {flag}{said}")


def reserve() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize(
    "hello, said",
    [
        ({"tokenizer_digest": b"other"}, "tokenizer.json"),
        ({"protocol_min": 2, "protocol_max": 3}, "protocol"),
        ({"roles": ["gateway"]}, "neither prefill nor decode"),
    ],
)
async def test_a_worker_that_is_none_of_ours(cluster, digest, hello, said):
    async with cluster(num_decode=2) as c:
        odd, link = c.decode[1], c.gateway.registry.decode[1]
        await odd.stop()
        await c.until(lambda: not link.is_serving)
        for name, value in hello.items():
            odd.hello.ClearField(name)
            odd.hello.MergeFrom(type(odd.hello)(**{name: value}))
        await odd.start(odd.port)
        await c.until(lambda: link.state.value == "refused")
        assert said in link.reason
        ready, body = c.gateway.readiness()
        assert ready and body["workers"][odd.address]["state"] == "refused"


async def test_a_worker_comes_back_in_another_role(cluster):
    """It is at its documented path, and serves there."""
    async with cluster(num_decode=2) as c:
        registry, odd = c.gateway.registry, c.decode[1]
        link = registry.decode[1]
        await odd.stop()
        await c.until(lambda: not link.is_serving)
        odd.role, odd.hello.roles[0] = "prefill", "prefill"
        await odd.start(odd.port)
        await c.until(lambda: link.is_serving)
        assert registry.prefill[-1] is link and link not in registry.decode
        assert link in c.fleet.candidates.serving("prefill") and link not in c.fleet.candidates.serving("decode")
