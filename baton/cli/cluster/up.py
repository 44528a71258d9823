"""`baton up`: gateways on this machine and workers here or on a cluster, until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal

from baton.cli.cluster.up_settings import add_up_flags, make_plan
from baton.cli.launch.control import DEFAULT_ADDRESS
from baton.cli.launch.placing.keeper import StartError
from baton.cli.launch.placing.launcher import LaunchError
from baton.cli.launch.placing.log import announce, log
from baton.cli.launch.placing.ports import PortError
from baton.cli.launch.stack import Stack
from baton.service.arguments import add_command
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.server import ListenError
from baton.service.settings import SettingsError

_EXAMPLES = """
baton up --model ./Llama-3.2-1B                       serve a folder of the Hugging Face layout
baton up --model m.gguf --decode 2 --speculator auto
baton up --model chat=./Qwen3-4B,code=./coder         two models behind one gateway
baton up --certs certs --listen 0.0.0.0:50051         with TLS and keys, after `baton certs --out certs`
baton generate "def f(x):"                            ask it, from another terminal
baton up --launcher ray --listen 10.0.0.1:50051 --certs certs --decode 3
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "up",
        summary="serve a model: gateway and workers as child processes",
        description="Serve a model on this machine. Prints `ready grpc=HOST:PORT ... pid=N` once it serves; drains on "
        "SIGINT and SIGTERM, a second signal kills.",
        usage="baton up [--model DIR|FILE] [OPTION ...]",
        examples=_EXAMPLES,
    )
    add_up_flags(parser, is_short=True)
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show every option, with its variable, and exit")
    parser.set_defaults(run=run)


class _HelpAll(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Print the help of all options, by process, and exit."""
        full = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, description=parser.description)
        add_up_flags(full, is_short=False)
        full.print_help()
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 drained, or stopped before it was ready; 1 failed, 2 wrong use."""
    try:
        plan = make_plan(args)
        return asyncio.run(_serve(Stack(plan), next(iter(plan.models))))
    except SettingsError as error:
        return fail("baton up", error, WRONG_USE)
    except (LaunchError, ListenError, PortError) as error:
        return fail("baton up", error, FAILED)
    except StartError as error:
        return fail("baton up", error, error.status)


async def _serve(stack: Stack, model: str | None) -> int:
    """Start the stack and drain it after a signal; return the exit status. `model` is the first of several models."""
    signals: asyncio.Queue[None] = asyncio.Queue()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, None)
    try:
        if await _unless_signalled(_announce(stack, model), signals):
            await signals.get()
            log("baton: draining; once more to kill")
            if await _unless_signalled(stack.drain(), signals):
                return 0
            status = 1
        else:
            log("baton: stopped before it was ready")
            status = 0
    except BaseException:  # otherwise the processes that were started would keep the event loop from closing
        await stack.kill()
        raise
    await stack.kill()
    return status


async def _announce(stack: Stack, model: str | None) -> bool:
    fields = await stack.start()
    announce(" ".join(["ready", *(f"{key}={value}" for key, value in {**fields, "pid": os.getpid()}.items())]))
    has_keys = "fleet" in fields  # then a request needs more flags than an address
    named = f" --model {shlex.quote(model)}" if model else ""
    ask = "" if has_keys else f'; next: baton generate "def f(x):"{named} --target {fields["grpc"]}'
    log(f"baton: page http://{fields['admin']}/{ask}")
    if (control := fields["control"]) != DEFAULT_ADDRESS:  # another stack may hold the default
        log(f"baton: scale this stack with --launcher {control}")
    return True


async def _unless_signalled(work, signals: asyncio.Queue) -> bool:
    """Return the result of `work`, or False if a signal arrives first. A signal that arrives with the end of `work` is
    left for the next call."""
    task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(signals.get())
    await asyncio.wait([task, signalled], return_when=asyncio.FIRST_COMPLETED)
    was_signalled = not signalled.cancel()
    if task.done():
        if was_signalled:
            signals.put_nowait(None)
        return task.result()
    task.cancel()
    await asyncio.wait([task])
    return False
