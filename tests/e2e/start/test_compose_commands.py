"""The commands of compose.yaml as processes of this machine: only paths, names and ports differ. They find each other
by name, health checks pass, a split request is answered over shared memory, and the index is in Redis behind TLS."""

import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml

from baton.service.security.access import Access
from baton.v1 import inference_pb2 as pb
from baton.v1 import inference_pb2_grpc
from tests.support.models import make_model
from tests.support.process import ROOT, Process
from tests.support.redis_server import ComposeRedis

SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
NAMES = ("prefill_worker_cpu", "decode_worker_cpu", "gateway")


class Containers:
    """The three processes; `words` replace a container's own paths, names and ports."""

    def __init__(self, folder: Path):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
        self.ports = dict(
            zip(("50061", "50062", "50051", "50052"), (str(each.getsockname()[1]) for each in sockets), strict=True)
        )
        for each in sockets:
            each.close()
        (folder / "kv").mkdir()
        self.redis = ComposeRedis(folder)
        self.secrets = secrets = folder / "secrets"
        made = secrets / "gateway.toml"
        made.chmod(0o600)
        made.write_text(f'redis = "{self.redis.url}"\n')
        self._words = [
            ("/model", str(make_model(folder / "model"))),
            ("/kv", str(folder / "kv")),
            ("/run/secrets", str(secrets)),
            ("0.0.0.0:9464", "127.0.0.1:0"),
            ("prefill:", "localhost:"),
            ("decode:", "localhost:"),
            *self.ports.items(),
        ]
        self._folder = folder
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> "Containers":
        self.redis.start()
        for name in NAMES:
            argv = [sys.executable if word == "python" else self._local(word) for word in SERVICES[name]["command"]]
            self.processes[name] = Process(
                name, [*argv, *(["--split=always"] if name == "gateway" else [])], self._folder
            )
        return self

    def __exit__(self, *exc) -> None:
        for process in reversed(self.processes.values()):
            process.stop()
        self.redis.__exit__(*exc)

    def health(self, name: str) -> subprocess.CompletedProcess:
        argv = [sys.executable, *map(self._local, SERVICES[name]["healthcheck"]["test"][2:])]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30)

    def _local(self, word: str) -> str:
        for theirs, ours in self._words:
            word = word.replace(theirs, ours)
        return word


@pytest.fixture
def containers(tmp_path):
    with Containers(tmp_path) as containers:
        yield containers


def test_a_request_through_the_commands_of_compose(containers):
    for process in containers.processes.values():
        process.ready()
    for name in NAMES:
        done = containers.health(name)
        assert (done.returncode, done.stdout.strip()) == (0, "SERVING"), done
    secrets = containers.secrets
    access = Access(secrets / "ca.crt", api_key_file=secrets / "api-key")
    with access.channel(f"127.0.0.1:{containers.ports['50051']}", blocking=True) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        ids = pb.TokenIds(ids=[7 + i % 500 for i in range(200)])
        request = pb.GenerateRequest(token_ids=ids, stopping=pb.Stopping(max_tokens=4, ignore_eos=True))
        with pytest.raises(grpc.RpcError) as caught:
            stub.Complete(request, timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answers = [stub.Complete(request, timeout=30, metadata=access.metadata) for _ in range(2)]
    assert answers[0].choices[0].token_ids == answers[1].choices[0].token_ids
    assert answers[1].usage.cached_tokens >= 128
    assert any((containers._folder / "kv").glob("baton-kv-*/kv")), "no shared memory offered"
    assert containers.redis.client.get("baton:secret") is not None
    for process in reversed(containers.processes.values()):
        assert process.stop() == 0, process.text()
        # uvloop may log that a TLS connection to Redis was closed while it still spoke: seen in one stop of four.
        own = [line for line in process.text().splitlines() if "Traceback" in line and "uvloop/sslproto" not in line]
        assert not own, process.text()
