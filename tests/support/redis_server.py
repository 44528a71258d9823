"""A real redis-server for one test: on a port that the system gave out, nothing written to disk."""

import os
import shutil
import socket
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import redis
import yaml

from tests.support.pace import patience
from tests.support.process import ROOT, Process


def redis_path() -> str:
    """Return the path of redis-server; without it the test fails, unless SKIP_REDIS=1."""
    path = shutil.which("redis-server")
    if path is None and os.environ.get("SKIP_REDIS") == "1":
        pytest.skip("SKIP_REDIS=1")
    assert path, "redis-server is not installed: apt-get install redis-server, or SKIP_REDIS=1"
    return path


class RedisServer:
    """`with RedisServer(folder) as server`; it can be frozen, killed and started again on the same port."""

    def __init__(self, folder: Path):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, socket_timeout=5)
        self._folder = folder
        self._process: Process | None = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *exc) -> None:
        self.client.close()
        self.kill()

    @property
    def process(self) -> Process:
        return self._process

    def start(self) -> None:
        # Beyond a limit of its files a write fails, as on a full disk; the signal would end it at once.
        self._process = Process("redis", ["env", "--ignore-signal=XFSZ", *self._argv()], self._folder)
        deadline = time.monotonic() + patience(10)
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self._process.alive and time.monotonic() < deadline, self._process.text()
                time.sleep(0.01)

    def _argv(self) -> list[str]:
        files = ["--dir", str(self._folder), "--save", "", "--appendonly", "no"]
        return [redis_path(), "--bind", "127.0.0.1", "--port", str(self.port), *files]

    def kill(self) -> None:
        self._process.kill()

    def freeze(self) -> None:
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()


class ComposeRedis(RedisServer):
    """Redis by compose.yaml's own command line; only paths and the port are this test's."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        secrets = folder / "secrets"
        subprocess.run([ROOT / "deploy" / "make-secrets", secrets], check=True, capture_output=True)
        self.ca = str(secrets / "ca.crt")
        self._secrets = secrets
        url = tomllib.loads((secrets / "gateway.toml").read_text())["redis"]
        self.url = url.replace("redis:6379", f"localhost:{self.port}").replace("/run/secrets", str(secrets))
        self.client = redis.Redis.from_url(self.url, socket_timeout=5)

    def _argv(self) -> list[str]:
        service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]
        words = {"redis-server": redis_path(), "6379": str(self.port)}
        return [words.get(word, word.replace("/run/secrets", str(self._secrets))) for word in service["command"]]
