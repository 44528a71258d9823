"""`baton scale decode=3`: set the number of a running stack's workers by role, or list them."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping

from baton.cli.launch.choice import add_launcher_flags, make_launcher
from baton.cli.launch.placing.launcher import MAX_WORKERS, LaunchError, PlacedWorker, WorkerLauncher, scale
from baton.protocol import ROLES
from baton.service.arguments import add_command, positive
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.security.access import add_access_flags, read_access
from baton.service.settings import SettingsError

_EXAMPLES = """
baton scale                                  the workers there are
baton scale decode=3
baton scale prefill=2 decode=4 --launcher kubernetes --namespace llm
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "scale",
        summary="start or drain workers of a running stack",
        description="Give a role so many workers. New ones are started by what has started the others; those that are too many are "
        "drained, so that no request is lost. Returns when all serve, and what was too many is gone.",
        examples=_EXAMPLES,
        usage="baton scale [prefill=N] [decode=N] [OPTIONS]",
    )
    parser.add_argument("wanted", nargs="*", metavar="ROLE=N", help="prefill=N or decode=N (default: list the workers)")
    parser.add_argument(
        "--timeout", type=positive, default=600.0, metavar="S", help="until it must be done (default: 600)"
    )
    add_launcher_flags(parser, "the stack on this machine, where there is one")
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Scale or list the workers; return 0 done, 1 failed, 2 wrong use."""
    try:
        wanted = _wanted(args.wanted)
        launcher = make_launcher(args, read_access(args))
    except (SettingsError, ValueError) as error:
        return fail("baton scale", error, WRONG_USE)
    except LaunchError as error:
        return fail("baton scale", error, FAILED)
    try:
        print(asyncio.run(_scale(launcher, wanted, args.timeout)))
    except LaunchError as error:
        return fail("baton scale", error, FAILED)
    except TimeoutError:
        return fail("baton scale", f"not done after {args.timeout:g} s; what was asked for goes on", FAILED)
    return 0


def _wanted(words: list[str]) -> dict[str, int]:
    """Parse ROLE=N arguments. Raises ValueError."""
    found: dict[str, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        if role not in ROLES or not number.isdecimal() or int(number) > MAX_WORKERS:
            raise ValueError(f"{word}: ROLE=N, as decode=3, with prefill or decode and at most {MAX_WORKERS}")
        found[role] = int(number)
    if found.get("decode") == 0:
        raise ValueError("decode=0: at least one decode worker is needed")
    return found


async def _scale(launcher: WorkerLauncher, wanted: Mapping[str, int], timeout_s: float) -> str:
    """Scale each role, and return the final workers as a table. Raises LaunchError, TimeoutError."""
    async with asyncio.timeout(timeout_s):
        # Workers that failed under an earlier command, which has reported the reason.
        failed = {worker.name for worker in await launcher.list() if worker.state == "failed"}
        for role, number in wanted.items():
            await scale(launcher, role, number)
        reported = ""
        async for workers in launcher.watch():
            if not wanted or not (missing := _missing([each for each in workers if each.name not in failed], wanted)):
                return _table(workers)
            if missing != reported:
                reported = missing
                print(f"scaling: {missing}", file=sys.stderr, flush=True)
    raise LaunchError("what places the workers has ended")


def _missing(workers: list[PlacedWorker], wanted: Mapping[str, int]) -> str:
    """Return what is still missing, in words; empty if nothing is. Raises LaunchError for a worker that does not
    start."""
    for worker in workers:
        if worker.state == "failed" and worker.role in wanted:
            raise LaunchError(f"{worker.name}: {worker.reason}")
    parts = []
    for role, number in wanted.items():
        num_serving = sum(worker.role == role and worker.state == "serving" for worker in workers)
        num_draining = sum(worker.role == role and worker.state == "draining" for worker in workers)
        if num_serving != number or num_draining:
            drains = f", {num_draining} drain" if num_draining else ""
            waits = next((worker.reason for worker in workers if worker.role == role and worker.reason), "")
            parts.append(f"{num_serving} of {number} {role} workers serve{drains}{', ' + waits if waits else ''}")
    return "; ".join(parts)


def _table(workers: list[PlacedWorker]) -> str:
    rows = [("worker", "role", "state", "address", "where", "model", "")]
    rows += [(each.name, each.role, each.state, each.address, each.where, each.model, each.reason) for each in workers]
    if not any(each.model for each in workers):
        rows = [(*row[:-2], row[-1]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{word:{width}}" for word, width in zip(row, widths)).rstrip() for row in rows)
