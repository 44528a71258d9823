"""`baton drain HOST:PORT`: a worker accepts nothing new, its requests end or move, and it exits or changes its role."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import grpc

from baton.protocol import ROLES
from baton.service.arguments import add_command, host_port
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.client import explain_failure, open_channel
from baton.service.security.access import add_access_flags, read_access
from baton.service.security.tls import WORKER_NAME
from baton.service.settings import SettingsError
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc

_POLL_S = 0.2
_START_S = 120.0  # a worker in a new role reads the weights again
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class NotDrained(Exception):
    """The worker did not drain; the message is one line."""


_EXAMPLES = """
baton drain 127.0.0.1:50061
baton drain 127.0.0.1:50061 --next-role prefill
baton drain 127.0.0.1:50061 --stay-away
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "drain",
        summary="empty a worker, and end it or change its role",
        description="Requests on the worker continue for the grace period, then move to other workers. "
        "Returns when the worker is gone, or serves in its next role. `baton up` restarts a worker as soon as it has ended, "
        "unless it is drained with --stay-away; compose and systemd follow their own restart policy, whatever is given here.",
        examples=_EXAMPLES,
    )
    parser.add_argument("target", type=host_port, metavar="HOST:PORT", help="the worker's gRPC address")
    after = parser.add_mutually_exclusive_group()
    after.add_argument("--stay-away", action="store_true", help="`baton up` leaves the worker ended")
    after.add_argument(
        "--next-role",
        choices=ROLES,
        default="",
        help="role to start in again (default: none, the worker exits)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=0.0,
        metavar="S",
        help="grace period of running requests (default: the worker's own)",
    )
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain the worker; return 0 drained, 1 failed, 2 wrong use."""
    try:
        print(asyncio.run(_drain(args)))
    except SettingsError as error:
        return fail("baton drain", error, WRONG_USE)
    except NotDrained as error:
        return fail("baton drain", f"{args.target}: {error}", FAILED)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            message = f"{args.target} is no worker: give the gRPC address of one, as `baton top` lists them"
        else:
            message = explain_failure(args.target, error.code(), error.details(), read_access(args))
        is_wrong = error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return fail("baton drain", message, WRONG_USE if is_wrong else FAILED)
    return 0


async def _drain(args: argparse.Namespace) -> str:
    """Drain the worker, and return the outcome in one line."""
    request = pb.DrainRequest(next_role=args.next_role, grace_s=args.grace, stay_away=args.stay_away)
    access, begun = read_access(args), time.monotonic()
    async with open_channel(args.target, access, WORKER_NAME) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        epoch = (await stub.Describe(pb.DescribeRequest(), timeout=5)).epoch
        first = await stub.Drain(request, timeout=5)
        print(f"draining: {first.role} worker, {first.num_sequences} keys run there", file=sys.stderr)
        while (hello := await _hello(stub)) is not None and hello.epoch == epoch:
            await asyncio.sleep(_POLL_S)
        if not args.next_role:
            return f"gone after {time.monotonic() - begun:.1f} s; {_what_follows(first.keeper, args.stay_away)}"
        try:
            async with asyncio.timeout(_START_S):
                while hello is None or hello.epoch == epoch:
                    await asyncio.sleep(_POLL_S)
                    hello = await _hello(stub)
        except TimeoutError:
            message = f"it has drained, and does not answer as a {args.next_role} worker after {_START_S:g} s"
            raise NotDrained(message) from None
    return f"{'/'.join(hello.roles)} worker after {time.monotonic() - begun:.1f} s"


def _what_follows(keeper: str, stays_away: bool) -> str:
    if not keeper:
        return "it was not started by `baton up`: what else keeps it running may start it again"
    if stays_away:
        return f"`{keeper}` leaves it ended"
    return f"`{keeper}` starts it again now (--stay-away prevents that)"


async def _hello(stub: worker_pb2_grpc.WorkerStub) -> pb.Hello | None:
    """Return the worker's Hello; None if nothing answers there. A worker that is only busy is asked again."""
    while True:
        try:
            return await stub.Describe(pb.DescribeRequest(), timeout=2)
        except grpc.aio.AioRpcError as error:
            if error.code() in _GONE:
                return None
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
