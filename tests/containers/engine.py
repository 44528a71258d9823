"""Docker's engine from Debian, of its own for a test run: a daemon whose data, socket and state lie in one folder."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

PACKAGES = ("docker.io", "docker-compose", "debootstrap", "iptables", "redis-server", "prometheus")
# GiB: images and what they are built from.
SCRATCH = Path(os.environ.get("BATON_CONTAINERS", "/var/tmp/baton-containers"))


def refusal() -> str:
    """Return why containers cannot run here; "" if they can."""
    if os.getuid() != 0:
        return "needs root: it starts Docker's engine and makes a base image with debootstrap"
    if shutil.which("apt-get") is None:
        return "needs Debian: engine, base image and Prometheus are its packages"
    return ""


def install() -> None:
    """Install what is missing of the engine and of what the base image is made with."""
    programs = ("dockerd", "docker-compose", "debootstrap", "iptables", "redis-server", "prometheus")
    missing = [package for package, program in zip(PACKAGES, programs, strict=True) if shutil.which(program) is None]
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for argv in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
            subprocess.run(["apt-get", "-qq", *argv], check=True, env=environment, stdout=subprocess.DEVNULL)


class Engine:
    """A running daemon. `docker(...)` and `compose(...)` return what the command printed."""

    def __init__(self, folder: Path = SCRATCH):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_INTERACTIVE_NO_CLI": "1",
        }

    def __enter__(self) -> "Engine":
        (self.folder / "docker.pid").unlink(missing_ok=True)
        self._log = open(self.folder / "dockerd.log", "wb")
        argv = ["dockerd", "--data-root", self.folder / "data", "--exec-root", self.folder / "exec"]
        argv += ["--host", self.environment["DOCKER_HOST"], "--pidfile", self.folder / "docker.pid"]
        self._daemon = subprocess.Popen(argv, stdout=self._log, stderr=subprocess.STDOUT)
        until = time.monotonic() + 60
        while subprocess.run([DOCKER, "info"], env=self.environment, capture_output=True).returncode:
            if self._daemon.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"dockerd did not start: {self.folder / 'dockerd.log'} says why")
            time.sleep(0.2)
        return self

    def __exit__(self, *exc) -> None:
        self._daemon.terminate()
        try:
            self._daemon.wait(60)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        self._log.close()

    def docker(self, *argv: object, input: str | None = None, check: bool = True, timeout: float = 1200) -> str:
        return self.run([DOCKER, *map(str, argv)], input=input, check=check, timeout=timeout)

    def run(self, argv: list[str], check: bool = True, timeout: float = 1200, **more) -> str:
        """Raises RuntimeError, with the end of what it said, where the command fails."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, timeout=timeout, **more)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(argv[:6])}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def has(self, image: str) -> bool:
        return bool(self.docker("images", "--quiet", image).strip())

    def inspect(self, thing: str) -> dict:
        return json.loads(self.docker("inspect", thing))[0]


# Debian's, which builds with BuildKit by itself; a newer client elsewhere on the path asks for a plugin.
DOCKER = "/usr/bin/docker"
