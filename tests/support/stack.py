"""A real stack: gateways, prefill and decode workers as separate processes, on ports that the system gives out."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cli.launch.placing.ports import HeldPorts
from tests.support.process import Process

if TYPE_CHECKING:
    from tests.support.fork_server.processes import ForkServer

# What no log may ever contain.
_BROKEN = re.compile(r"Traceback|was never retrieved|Task was destroyed|coroutine .* was never awaited")


# A step takes so long that whatever is done to a running request finds it running, however fast the machine is.
SLOW_STEPS = "engine.step=sleep:0.02"


class Stack:
    """Start with `with Stack(...) as stack`; what did not stop by itself is killed at the end."""

    launcher = ("-m",)  # arguments of python with the name of a program

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        num_gateways: int = 1,
        options: Sequence[str] = (),
        prefill_options: Sequence[str] = (),
        decode_options: Sequence[str] = (),
        unlike_decode: Sequence[Sequence[str]] = (),
        gateway_options: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        failpoints: bool = False,
        fork_server: "ForkServer | None" = None,
    ):
        """`options` go to both roles of workers, `unlike_decode` to further decode workers, each its own. `folder`
        receives the logs. `failpoints`: processes can be armed. `fork_server`: all are forked from it."""
        self.model, self.folder = model, folder
        self.num_gateways = num_gateways
        self.gateway_options = list(gateway_options)
        self.env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self.failpoints, self.fork_server = failpoints, fork_server
        self._plans = [(f"prefill{i}", "prefill_worker", [*options, *prefill_options]) for i in range(num_prefill)]
        self._plans += [(f"decode{i}", "decode_worker", [*options, *decode_options]) for i in range(num_decode)]
        self._plans += [
            (f"decode{num_decode + i}", "decode_worker", [*options, *own]) for i, own in enumerate(unlike_decode)
        ]
        self.prefill: list[Process] = []
        self.decode: list[Process] = []
        self.gateways: list[Process] = []
        self.past: list[Process] = []  # that others have taken the place of
        self.address: dict[str, str] = {}  # process name -> host:port of its gRPC server

    def __enter__(self) -> "Stack":
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, module, options in self._plans:
                role = self.prefill if module == "prefill_worker" else self.decode
                role.append(self._spawn(name, module, options))
            self._await(self.workers)
            for i in range(self.num_gateways):
                self.gateways.append(self._spawn(f"gateway{i}", "gateway", self._gateway_options()))
            self._await(self.gateways)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    @property
    def workers(self) -> list[Process]:
        return self.prefill + self.decode

    @property
    def processes(self) -> list[Process]:
        return self.gateways + self.workers

    def restart(self, process: Process) -> Process:
        """Begin another life of one that is gone, at the same address and with the same options; waits until it is
        ready."""
        self.past.append(process)
        folder = self.folder / f"{process.name}-{len(self.past)}"
        folder.mkdir()
        argv = [*process.argv]
        argv[argv.index("--listen") + 1] = self.address[process.name]
        reborn = self._process(process.name, argv, folder)
        group = next(group for group in (self.gateways, self.prefill, self.decode) if process in group)
        group[group.index(process)] = reborn
        self._await([reborn])
        return reborn

    @property
    def target(self) -> str:
        """Return host:port of the first gateway."""
        return self.address["gateway0"]

    @contextmanager
    def armed(self, text: str) -> Iterator[None]:
        """Arm failpoints of all workers."""
        with ExitStack() as exits:
            for process in self.workers:
                exits.enter_context(process.armed(text))
            yield

    def stop(self) -> dict[str, int]:
        """Stop gateways first, then workers, by SIGTERM; returns exit statuses by name, of those that no test has
        killed."""
        statuses = {}
        for group in (self.gateways, self.workers):
            alive = [process for process in group if not process.killed]
            for process in alive:
                process.terminate()
            statuses |= {process.name: process.stop() for process in alive}
        return statuses

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def text(self) -> str:
        """Return all that all processes have written."""
        return "\n".join(process.text() for process in self.past + self.processes)

    def complaints(self) -> list[str]:
        """Return lines of the logs that show a fault that was not handled."""
        return [f"{process.name}: {line}" for process in self.past + self.processes for line in _broken_lines(process)]

    def _gateway_options(self) -> list[str]:
        prefill = ",".join(self.address[process.name] for process in self.prefill)
        decode = ",".join(self.address[process.name] for process in self.decode)
        return ["--prefill-workers", prefill, "--decode-workers", decode, *self.gateway_options]

    def _spawn(self, name: str, module: str, options: list[str]) -> Process:
        argv = [sys.executable, *self.launcher, module, "--model", str(self.model), "--listen", "127.0.0.1:0", *options]
        return self._process(name, argv, self.folder)

    def _process(self, name: str, argv: list[str], folder: Path) -> Process:
        if self.fork_server is not None:
            return self.fork_server.process(name, argv, folder, self.env, self.failpoints)
        return Process(name, argv, folder, self.env, self.failpoints)

    def _await(self, processes: list[Process]) -> None:
        for process in processes:
            self.address[process.name] = process.ready()["grpc"]


class TogetherStack(Stack):
    """A stack whose gateway and only worker are one process, found among the gateways."""

    def __init__(self, model: Path, folder: Path, **options):
        super().__init__(model, folder, num_prefill=0, num_decode=0, **options)
        self._worker_options = options.get("options", ())
        self._ports = HeldPorts()

    def _spawn(self, name: str, module: str, options: list[str]) -> Process:
        model = ["--model", str(self.model)]
        worker = [*model, "--listen", self._ports.hold("127.0.0.1:0"), *self._worker_options]
        argv = [sys.executable, "-m", "baton.cli.launch.together", *model, "--listen", "127.0.0.1:0"]
        return self._process(name, [*argv, *self.gateway_options, "--", *worker], self.folder)


def _broken_lines(process: Process) -> list[str]:
    return [line for line in process.text().splitlines() if _BROKEN.search(line)]
