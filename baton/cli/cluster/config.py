"""`baton config`: print the settings that `baton up` would use, and where each was set, as a file for `--config`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from baton.cli.cluster.up_settings import (
    COUNTED,
    Resolved,
    UpSettings,
    add_up_flags,
    gateway_settings,
    options_of,
    resolve,
)
from baton.cli.launch.worker_options import worker_settings
from baton.protocol import ROLES
from baton.service.arguments import add_command
from baton.service.exits import WRONG_USE, fail
from baton.service.settings import SettingsError, flat_values, is_in_environment, variable
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings

_VALUE_WIDTH = 44
Values = dict[str, tuple[object, str]]


_EXAMPLES = """
baton config --decode 2
BATON_BLOCK_SIZE=64 baton config --decode 2 > baton.toml && baton up --config baton.toml
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "config",
        summary="print the settings in force, and where each was set",
        description="Takes the flags of `baton up`, and prints what it would run with, as TOML for `baton up --config`. "
        "A file is overridden by BATON_ variables, these by flags.",
        usage="baton config [OPTION of baton up ...]",
        examples=_EXAMPLES,
    )
    add_up_flags(parser, is_short=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings; return 0, or 2 for wrong use."""
    try:
        print("\n".join(_lines(resolve(args), vars(args))))
    except SettingsError as error:
        return fail("baton config", error, WRONG_USE)
    return 0


def _lines(found: Resolved, flags: Mapping[str, object]) -> Iterator[str]:
    workers = {role: _worker_values(found, role, flags) for role in ROLES}
    common = {name: each for name, each in workers["prefill"].items() if workers["decode"][name] == each}
    yield from _section(_up_values(found, flags))
    yield ""
    yield from _section(common)
    for role in ROLES:
        own = {name: each for name, each in workers[role].items() if name not in common}
        if own and found.num_workers[role]:  # `baton up` refuses options of a role without workers
            yield f"\n[{role}_worker]"
            yield from _section(own)
    settings = gateway_settings(found)
    yield "\n[gateway]"
    yield from _section(_with_sources(flat_values(settings), GatewaySettings, ("gateway.",), found, flags))


def _up_values(found: Resolved, flags: Mapping[str, object]) -> Values:
    values = _with_sources(flat_values(found.up), UpSettings, ("",), found, flags)
    name, source = values["served_model_name"]
    if name is not None and source == "default":  # the model's own, which is none of another model
        values["served_model_name"] = (None, f"default: {name}")
    return values


def _worker_values(found: Resolved, role: str, flags: Mapping[str, object]) -> Values:
    settings = worker_settings(found.workers.values[role], next(iter(found.models.values())))
    values = _with_sources(flat_values(settings), WorkerSettings, (f"{role}.", ""), found, flags)
    if values["threads"][1] == "default" and values["threads"][0] is not None:
        values["threads"] = (values["threads"][0], "the cores, divided among the workers")
    counted: Values = {name: (None, words) for name, words in COUNTED.items() if values[name][1] == "default"}
    return {**values, **counted}


def _with_sources(
    values: Mapping[str, object], cls: type, prefixes: Sequence[str], found: Resolved, flags: Mapping[str, object]
) -> Values:
    """Return each value with where it was set. `prefixes` are those of the flags that set it, the one that wins
    first."""
    return {
        name: (values[name], _source(name, [prefix + name for prefix in prefixes], found, flags))
        for name in options_of(cls)
    }


def _source(name: str, set_by: Sequence[str], found: Resolved, flags: Mapping[str, object]) -> str:
    for flag in set_by:
        if flag in flags:
            return f"--{flag.replace('_', '-')}"
        if flag in found.sources:
            return found.sources[flag]
    return variable(name) if is_in_environment(name) else "default"


def _section(values: Values) -> Iterator[str]:
    for name, (value, source) in values.items():
        setting = f"# {name} is not set" if value is None else f"{name} = {_toml(value)}"
        yield f"{setting:{_VALUE_WIDTH}} # {source}"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # JSON has no inf
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return text.replace("\x7f", r"\u007f")
