"""Run the command line of a worker, with the name and defaults of its role."""

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from baton.engine.native.tier import available
from baton.lines import one_line
from baton.service import logs, progress
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.server import ListenError, run
from baton.service.settings import SettingsError, add_flags, load_settings, make_parser
from baton.worker.settings import WorkerSettings

SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True)
class Role:
    """One of the two roles of a worker program."""

    name: str  # prefill | decode
    description: str
    gpu_defaults: Mapping[str, object] = field(default_factory=dict)  # replace defaults of WorkerSettings on a GPU


def main(role: Role, argv: Sequence[str] | None = None, serve: Callable[..., Awaitable[int]] | None = None) -> int:
    """Run a worker to its end. Return 0 when it was drained, 1 when it failed, 2 for wrong use or a model that cannot
    be served, 3 when it was drained to stay away; a failed start writes one line to stderr. `serve` replaces app.serve
    if the process is more than a worker."""
    prog = f"{role.name}_worker"
    parser = make_parser(f"python -m {prog}", role.description)
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML; environment and flags win")
    add_flags(parser, WorkerSettings)
    args = parser.parse_args(argv)
    try:
        settings = load_settings(WorkerSettings, _flags(args), file=args.config)
        available()  # raises ValueError for a wrong BATON_ISA
    except (SettingsError, ValueError) as error:
        return fail(prog, one_line(error), WRONG_USE)
    logs.setup(role.name, settings.log_level)

    # Two workers on one machine share its cores: a thread of one that spins for work stalls parallel regions of the
    # other (measured: about 8 ms each on 2 cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The event loop may hold the interpreter for this long when the engine's thread wants it back after an operator;
    # the default of 5 ms is a whole step of a small model. Waiting threads poll at the same interval: with 0.1 ms and
    # 16 streams a worker made ten system calls per token.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Imported only now: torch takes seconds, and a wrong flag or --help should not wait for it.
    with progress.phase(prog, "importing torch"):
        from baton.engine.core.device import find_device
        from baton.engine.core.model_errors import ModelError
        from baton.worker import app
        from baton.worker.session.table import load_table

        table = load_table()

    try:
        if find_device(settings.engine.device).type == "cuda":
            settings = load_settings(WorkerSettings, _flags(args), file=args.config, defaults=role.gpu_defaults)
        ended = run(lambda stop: (serve or app.serve)(settings, role.name, table, stop), use_uvloop=True)
        if isinstance(ended, app.NextRole):
            _become(ended, sys.argv[1:] if argv is None else argv)
        return ended
    except (ListenError, OSError) as error:
        return fail(prog, one_line(error), FAILED)
    except (ModelError, SettingsError, ValueError) as error:
        return fail(prog, one_line(error), WRONG_USE)


def _become(following: "NextRole", argv: Sequence[str]) -> NoReturn:  # noqa: F821
    """Replace this process by the other role's program, at the address that gateways know."""
    listen = ("--listen", following.address)
    os.execv(sys.executable, [sys.executable, "-m", f"{following.role}_worker", *argv, *listen])


def _flags(args) -> dict[str, object]:
    return {name: value for name, value in vars(args).items() if name != "config"}
