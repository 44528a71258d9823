"""`baton rank`: run a pipeline stage of a worker on another host."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from baton.lines import one_line
from baton.service import logs
from baton.service.arguments import add_command, host_port, port, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.server import run as run_process
from baton.service.security.access import add_access_flags, read_access
from baton.service.settings import SettingsError

_EXAMPLES = """
baton rank --leader 10.0.0.1:50070 --model /models/large
baton rank --leader 10.0.0.1:50070 --model /models/large --tls-ca ca.crt --tls-cert rank.crt --tls-key rank.key
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "rank",
        summary="compute some layers of a worker on another host",
        description="Joins the worker that was started with --remote-stages and --rank-listen, reads the layers that it is "
        "given, and ends when the worker ends.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--leader", type=host_port, required=True, metavar="HOST:PORT", help="the worker's --rank-listen"
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR|FILE", help="the worker's model, on this host"
    )
    parser.add_argument("--threads", type=whole, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument(
        "--kv-host", default="127.0.0.1", metavar="HOST", help="address of this host at which other workers take its KV"
    )
    parser.add_argument(
        "--kv-port",
        type=port,
        default=0,
        metavar="PORT",
        help="its port for that, of gRPC; without certificates tcp has the next one (default: the system chooses)",
    )
    add_access_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the stage; return 0 after a signal, 1 if the worker refuses it or ends, 2 for wrong use or a model that
    cannot be served."""
    try:
        access = read_access(args)
    except SettingsError as error:
        return fail("baton rank", one_line(error), WRONG_USE)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logs.setup("rank", "info")
    from baton.engine.core.model_errors import ModelError  # imports torch, which takes seconds
    from baton.worker.ranks.rank import NotJoined, RankSettings, serve_rank

    settings = RankSettings(args.leader, args.model, args.threads, access, args.kv_host, args.kv_port)
    try:
        return run_process(lambda stop: serve_rank(settings, stop))
    except NotJoined as error:
        return fail("baton rank", one_line(error), FAILED)
    except (ModelError, ValueError) as error:
        return fail("baton rank", one_line(error), WRONG_USE)
