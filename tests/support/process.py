"""One process of a test or a bench: started in a session of its own, its output in files, never left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from baton.failpoints import VARIABLE
from tests.support.pace import patience

ROOT = Path(__file__).resolve().parents[2]
NODE_CLIENTS = ROOT / "tests" / "clients" / "node"
# Not a preexec_fn: that takes a fork, which gRPC's threads in this process would see.
# An interrupt counts also where the tests themselves are run in the background, which leaves it ignored.
_DIE_WITH_PARENT = ("env", "--default-signal=INT", "setpriv", "--pdeathsig", "KILL", "--")


def environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return that of this process with `changes`; None: without that variable."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


class Process:
    """A child with `NAME.out` and `NAME.log` (stdout, stderr) in `folder`; it dies with the process that started it.

    `failpoints`: it looks for them while it runs, see `armed` and baton/failpoints.py."""

    def __init__(
        self,
        name: str,
        argv: list[str],
        folder: Path,
        env: Mapping[str, str | None] | None = None,
        failpoints: bool = False,
    ):
        """`env`: see `environment`."""
        self.name, self.argv = name, argv
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        self._failpoints = folder / f"{name}.failpoints" if failpoints else None
        if failpoints:
            env = {**(env or {}), VARIABLE: f"@{self._failpoints}"}
        self.started = time.monotonic()
        self.killed = False  # on purpose, by a test
        self._terminated = False
        self.popen = self._start({"PYTHONUNBUFFERED": "1", **(env or {})})

    def _start(self, env: Mapping[str, str | None]) -> subprocess.Popen:
        with self.out.open("wb") as out, self.log.open("wb") as log:
            return subprocess.Popen(
                [*_DIE_WITH_PARENT, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=ROOT,
                env=environment(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def ready(self, timeout_s: float = 60) -> dict[str, str]:
        """Return the fields of the `ready key=value ...` line. Raises RuntimeError with the log when none comes."""
        deadline = self.started + patience(timeout_s)
        while True:
            found = re.search(r"^ready (.*)\n", self.out.read_text(errors="replace"), re.MULTILINE)
            if found:
                return dict(field.split("=", 1) for field in found[1].split())
            if not self.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} is not ready (exit {self.popen.poll()})\n{self.text()}")
            time.sleep(0.01)

    def text(self) -> str:
        """Return everything it has written."""
        parts = (path.read_text(errors="replace") for path in (self.out, self.log))
        return f"--- {self.name}: {' '.join(self.argv)}\n" + "".join(parts)

    def tail(self, num_lines: int = 25) -> str:
        return "\n".join(self.text().splitlines()[-num_lines:])

    def arm(self, text: str) -> None:
        """Set the process's failpoints from now on; "" clears them."""
        other = self._failpoints.with_suffix(".next")
        other.write_text(text)
        os.replace(other, self._failpoints)  # never half a text

    @contextmanager
    def armed(self, text: str) -> Iterator[None]:
        self.arm(text)
        try:
            yield
        finally:
            self.arm("")

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_killed(self, timeout_s: float = 30) -> None:
        """Wait until a failpoint has killed it."""
        assert self.wait(timeout_s) == -signal.SIGKILL, self.tail()
        self.killed = True

    @property
    def is_frozen(self) -> bool:
        return self.alive and Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def wait(self, timeout_s: float = 30) -> int:
        return self.popen.wait(patience(timeout_s))

    def terminate(self) -> None:
        """Send SIGTERM, once: a second one would ask it to go without draining."""
        if self.alive and not self._terminated:
            self._terminated = True
            self.popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL to it and all it has started."""
        self.killed = self.killed or self.alive
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()

    def stop(self, timeout_s: float = 15) -> int:
        """Send SIGTERM, then SIGKILL to what is left; returns the exit status (that of SIGKILL: it did not stop)."""
        self.terminate()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        return self.popen.returncode


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that live."""
    lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(each) for text in lists for each in text.split()]


def node() -> str:
    """Return path of node, with the pinned packages of the clients in tests/clients/node installed beside them."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node and npm, "node and npm are not installed: apt-get install nodejs npm"
    wanted = json.loads((NODE_CLIENTS / "package.json").read_text())["dependencies"]
    if not all((NODE_CLIENTS / "node_modules" / name).exists() for name in wanted):
        subprocess.run([npm, "ci"], cwd=NODE_CLIENTS, check=True, capture_output=True, timeout=300)
    return node


def resident_bytes() -> int:
    """Return memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def assert_one_line(stderr: str, *names: str) -> None:
    """Check that the last line of stderr says it all, and that nothing before it looks like a crash."""
    lines = stderr.strip().splitlines()
    assert lines, "nothing was printed"
    assert "Traceback" not in stderr, stderr
    for name in names:
        assert name in lines[-1], f"{name!r} is not in: {lines[-1]}"
