"""The chart's Redis, as a real one: what its pod runs, and the probe that starts it again."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import redis

from tests.chart.rendering import ROOT, container, pods, render
from tests.support.redis_server import RedisServer, redis_path

KEPT_AS = {"redis.crt": "tls.crt", "redis.key": "tls.key", "ca.crt": "ca.crt", "redis.acl": "redis.acl"}


class ChartRedis(RedisServer):
    """The command line of the chart's pod; only paths and the port are this test's."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.pod = container(dict(pods(render({"secrets": {"certificates": "cert-manager"}})))["redis"])
        self._mounted, self._tmp = folder / "mounted", folder / "tmp"
        self._mounted.mkdir()
        self._tmp.mkdir()
        self.renew()
        for name in KEPT_AS.values():
            (self._mounted / name).symlink_to(f"..data/{name}")
        url = tomllib.loads((self._mounted / "..data" / "gateway.toml").read_text())["redis"]
        url = url.replace("redis:6379", f"localhost:{self.port}").replace("/run/secrets", str(self._mounted))
        self.client = redis.Redis.from_url(url.replace("baton:", "default:"), socket_timeout=5)

    def renew(self) -> None:
        """Replace all files at once, as the kubelet does."""
        made = self._folder / f"secrets-{len(list(self._folder.glob('secrets-*')))}"
        subprocess.run([ROOT / "deploy" / "make-secrets", made], check=True, capture_output=True)
        for old, new in KEPT_AS.items():
            (made / old).rename(made / new)
        (self._folder / "next").symlink_to(made)
        os.replace(self._folder / "next", self._mounted / "..data")

    def probe(self, kind: str) -> int:
        return subprocess.run(self._here(self.pod[kind]["exec"]["command"])).returncode

    def _argv(self) -> list[str]:
        return self._here([*self.pod["command"], *self.pod["args"]])

    def _here(self, words: list[str]) -> list[str]:
        paths = {
            "/run/secrets/tls": str(self._mounted),
            "/run/secrets/redis": str(self._mounted),
            "/tmp": str(self._tmp),
        }
        own = {"redis-server": redis_path(), "6379": str(self.port)}
        return [own.get(word) or re.sub("|".join(paths), lambda found: paths[found[0]], word) for word in words]


def test_a_renewed_certificate_has_redis_started_again(tmp_path):
    with ChartRedis(tmp_path) as server:
        assert server.probe("livenessProbe") == 0
        server.renew()
        server.client.connection_pool.disconnect()
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            server.client.ping()  # it holds what it has loaded
        assert server.probe("livenessProbe") != 0
        server.kill()
        server.start()
        assert server.client.ping() and server.probe("livenessProbe") == 0
