"""Run a gateway: `python -m gateway`. It prints `ready grpc=HOST:PORT admin=HOST:PORT pid=N` once it serves."""

import sys
from collections.abc import Sequence
from pathlib import Path

from baton.lines import one_line
from baton.service import logs
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.net.server import ListenError, run
from baton.service.settings import SettingsError, add_flags, load_settings, make_parser
from gateway.config.settings import GatewaySettings


def read_settings(argv: Sequence[str] | None = None) -> GatewaySettings:
    """Return the settings from flags, environment variables and a file. Raises SettingsError; an unknown flag ends the
    process."""
    parser = make_parser("python -m gateway", "the entry point for clients: tokenizes, routes, streams; needs no GPU")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML; environment and flags win")
    add_flags(parser, GatewaySettings)
    flags = vars(parser.parse_args(argv))
    file = flags.pop("config")
    return load_settings(GatewaySettings, flags, file=file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until it is told to stop. Return 0 after draining, 1 for a failed start, 2 for wrong use; a failed
    start says why in one line on stderr."""
    try:
        settings = read_settings(argv)
    except SettingsError as error:
        return fail("gateway", one_line(error), WRONG_USE)
    logs.setup("gateway", settings.log_level)

    from gateway.app import serve

    try:
        return run(lambda stop: serve(settings, stop), use_uvloop=True)
    except SettingsError as error:
        return fail("gateway", one_line(error), WRONG_USE)
    except ListenError as error:
        return fail("gateway", one_line(error), FAILED)


if __name__ == "__main__":
    sys.exit(main())
