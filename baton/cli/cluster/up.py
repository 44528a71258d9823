"""`baton up`: gateway and workers on this machine, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from baton.cli.cluster.certs import CA_CERT, CREDENTIALS, SECRET
from baton.cli.cluster.keeper import StartError
from baton.cli.cluster.stack import SHIPPED_MODEL, PortError, Stack, StackPlan, divide_cores
from baton.gguf import is_gguf
from baton.protocol import ROLES
from baton.service.settings import SettingsError, add_flags, given, load_settings, option, to_argv
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings

# What `baton up` sets itself.
_NOT_OPTIONS = ("model", "listen", "admin", "gateways")
_NOT_GATEWAY_OPTIONS = ("model", "listen", "prefill_workers", "decode_workers", "redis", "admin")


@dataclass(frozen=True)
class UpSettings:
    """Settings of `baton up` itself; worker options come beside them."""

    model: Path | None = option("model folder or .gguf file (default: the shipped one)", None, metavar="DIR|FILE")
    listen: str = option("address for clients; port 0: the system chooses", "127.0.0.1:50051", metavar="HOST:PORT")
    prefill: int = option("number of prefill workers", 1, metavar="N")
    decode: int = option("number of decode workers", 1, metavar="N")
    gateways: int = option(
        "number of gateways; those beyond the first at ports that the system chooses", 1, metavar="N"
    )
    redis: str | None = option("prefix index in Redis (default: embedded)", None, metavar="URL")
    admin: str | None = option("address of the admin server", None, metavar="HOST:PORT")
    certs: Path | None = option("TLS and credentials of this folder, which `baton certs` wrote", None, metavar="DIR")

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ValueError(f"--prefill {self.prefill}: must not be negative")
        if self.decode < 1:
            raise ValueError(f"--decode {self.decode}: at least one decode worker is needed")
        if self.gateways < 1:
            raise ValueError(f"--gateways {self.gateways}: at least one is needed")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "up",
        help="serve a model: gateway and workers as child processes",
        description="Serve a model on this machine. Prints `ready grpc=HOST:PORT ... pid=N` once it serves; drains on "
        "SIGINT and SIGTERM, a second signal kills.",
        epilog="Worker options hold for both roles; --prefill.OPTION and --decode.OPTION for one.",
        allow_abbrev=False,
    )
    add_flags(parser, UpSettings)
    add_flags(parser.add_argument_group("worker options"), WorkerSettings, skip=_NOT_OPTIONS)
    for role in ROLES:
        add_flags(parser, WorkerSettings, f"{role}.", skip=_NOT_OPTIONS, hidden=True)
    add_flags(parser.add_argument_group("gateway options"), GatewaySettings, "gateway.", skip=_NOT_GATEWAY_OPTIONS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal: 0 drained, 1 failed, 2 wrong use."""
    try:
        return asyncio.run(_serve(Stack(make_plan(args))))
    except SettingsError as error:
        return _fail(error, 2)
    except PortError as error:
        return _fail(error, 1)
    except StartError as error:
        return _fail(error, error.status)


def make_plan(args: argparse.Namespace) -> StackPlan:
    """Check all that can be checked before a process is started. Raises SettingsError or StartError."""
    settings = load_settings(UpSettings, args)
    model = settings.model or SHIPPED_MODEL
    wanted = model if is_gguf(model) else model / "config.json"
    if not wanted.is_file():
        what = "give --model DIR" if settings.model is None else "is it a model folder?"
        raise StartError(f"{wanted} does not exist; {what}", 1)
    gateway = {name: value for name in ("redis", "admin") if (value := getattr(settings, name))}
    if settings.certs:
        gateway = {**_gateway_files(settings.certs), **gateway}
    gateway_options = to_argv(GatewaySettings, {**gateway, **given(GatewaySettings, args, "gateway.")})
    num_workers = {role: getattr(settings, role) for role in ROLES}
    values, cpu_roles = _worker_values(args, num_workers, model, settings.certs)
    worker_options = {role: to_argv(WorkerSettings, values[role]) for role in ROLES}
    return StackPlan(model, settings.listen, num_workers, worker_options, gateway_options, settings.gateways, cpu_roles)


def _gateway_files(certs: Path) -> dict[str, object]:
    files = {"credentials": certs / CREDENTIALS, "cluster_secret": certs / SECRET, "fleet_listen": "127.0.0.1:0"}
    return {**_tls_files(certs, "gateway"), **files}


def _tls_files(certs: Path, role: str) -> dict[str, Path]:
    """Raises SettingsError."""
    files = {"tls_cert": certs / f"{role}.crt", "tls_key": certs / f"{role}.key", "tls_ca": certs / CA_CERT}
    for path in files.values():
        if not path.is_file():
            raise SettingsError(
                f"--certs {certs}: {path.name} is not there; `baton certs --out DIR` writes such a folder"
            )
    return files


def _worker_values(
    args: argparse.Namespace, num_workers: dict[str, int], model: Path, certs: Path | None
) -> tuple[dict[str, dict[str, object]], list[str]]:
    """Return the worker options that were given, by role, with its threads, each role's checked as its worker would; and
    the roles that compute on the CPU. Raises SettingsError."""
    both = {name: value for name, value in given(WorkerSettings, args).items() if name not in _NOT_OPTIONS}
    own = {role: given(WorkerSettings, args, f"{role}.") for role in ROLES}
    for role in ROLES:
        if own[role] and not num_workers[role]:
            raise SettingsError(f"--{role}.{next(iter(own[role])).replace('_', '-')} has no effect with --{role} 0")
    for name in both:
        if all(name in own[role] for role in ROLES):
            flag = name.replace("_", "-")
            raise SettingsError(f"--{flag} has no effect beside --prefill.{flag} and --decode.{flag}")
    files = {role: _tls_files(certs, role) if certs else {} for role in ROLES}
    values = {role: {**files[role], **both, **own[role]} for role in ROLES}
    settings = {role: load_settings(WorkerSettings, values[role], defaults={"model": model}) for role in ROLES}
    threads = divide_cores(num_workers, {role: settings[role].engine.threads for role in ROLES})
    cpu_roles = [role for role in ROLES if settings[role].engine.device == "cpu"]
    return {role: {**values[role], "threads": threads[role]} for role in ROLES}, cpu_roles


async def _serve(stack: Stack) -> int:
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    if not await _unless_signalled(_announce(stack), signals):
        await stack.kill()
        return 1
    await signals.get()
    print("baton: draining; once more to kill", file=sys.stderr, flush=True)
    if await _unless_signalled(stack.drain(), signals):
        return 0
    await stack.kill()
    return 1


async def _announce(stack: Stack) -> bool:
    fields = await stack.start()
    print("ready", *(f"{key}={value}" for key, value in {**fields, "pid": os.getpid()}.items()), flush=True)
    return True


async def _unless_signalled(work, signals: asyncio.Queue) -> bool:
    """The result of `work`, or False when a signal came first."""
    task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(signals.get())
    await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return False


def _fail(error: Exception, status: int) -> int:
    print(f"baton up: {error}", file=sys.stderr)
    return status
