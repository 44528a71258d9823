"""Settings of a process, loaded into a frozen dataclass: flags override the environment, which overrides the file. All
three are checked alike.

A field `block_size` is `block_size = 32` in the TOML file, BATON_BLOCK_SIZE in the environment and `--block-size` as a
flag. Fields are str, int, float, bool, Path, tuple[str, ...] (commas between), or one of these or None. The fields of a
nested dataclass count as the class's own: `engine.block_size` is `--block-size` too."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.metadata
import os
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

_ENV = "BATON_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
T = TypeVar("T")


class SettingsError(Exception):
    """An invalid setting: one line that names the setting and what to do. The process exits with status 2."""


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with --help and --version that accepts no abbreviated flags; wrong use exits with status 2."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add_version(parser)
    return parser


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, which prints the version of the installed package."""
    parser.add_argument("--version", action="version", version=f"baton {installed_version()}")


def installed_version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("baton-llm")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    prefix: str = "",
    *,
    skip: tuple[str, ...] = (),
    hidden: bool = False,
    shown: Collection[str] | None = None,
    names_variable: bool = False,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Add a flag `--PREFIXfield-name` for each field of `cls` except `skip`; a flag that is not given is absent from
    the namespace. `hidden` hides all flags from the help, `shown` all but the named ones. `defaults` are the command's
    own."""
    for field, kind in flat_fields(cls).values():
        if field.name in skip:
            continue
        shared: dict[str, typing.Any] = {"dest": prefix + field.name, "default": argparse.SUPPRESS}
        is_hidden = hidden or (shown is not None and field.name not in shown)
        default = (defaults or {}).get(field.name, field.default)
        shared["help"] = argparse.SUPPRESS if is_hidden else _help(field, default, names_variable)
        flag = f"--{prefix}{_dashed(field.name)}"
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
        else:
            metavar = field.metadata.get("metavar") or "|".join(field.metadata.get("choices", ())) or None
            parser.add_argument(flag, metavar=metavar, **shared)


def _help(field: dataclasses.Field, default: object, names_variable: bool) -> str:
    help = field.metadata.get("help", "").replace("%", "%%")
    if default not in (dataclasses.MISSING, None, ()):
        help += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
    return f"{help} [{variable(field.name)}]" if names_variable else help


def load_settings(
    cls: type[T],
    flags: argparse.Namespace | Mapping[str, object],
    env: Mapping[str, str] | None = None,
    file: Path | str | None = None,
    defaults: Mapping[str, object] | None = None,
) -> T:
    """Build `cls` from `defaults` (the role's own) < `file` (TOML) < `env` < `flags`. Raises SettingsError."""
    sourced = sourced_settings(cls, flags, env, file, defaults)
    for field, _ in flat_fields(cls).values():
        if field.name not in sourced and field.default is dataclasses.MISSING:
            raise SettingsError(f"{_flag(field.name)} is missing")
    try:
        return make_settings(cls, {name: each.value for name, each in sourced.items()})
    except ValueError as error:
        raise SettingsError(name_sources(str(error), sourced)) from None


class Sourced(typing.NamedTuple):
    """A value and where it was set: a flag, a variable, `FILE: key`, or `default of the role`."""

    value: object
    source: str


def sourced_settings(
    cls: type,
    flags: argparse.Namespace | Mapping[str, object],
    env: Mapping[str, str] | None = None,
    file: Path | str | None = None,
    defaults: Mapping[str, object] | None = None,
) -> dict[str, Sourced]:
    """Return the values that are set, by field; other fields keep their defaults. Raises SettingsError."""
    sourced = {name: Sourced(value, "default of the role") for name, value in (defaults or {}).items()}
    if file is not None:
        sourced |= from_table(cls, read_table(file), file)
    from_env = _from_env(cls, os.environ if env is None else env)
    sourced |= {name: Sourced(value, variable(name)) for name, value in from_env.items()}
    return sourced | {name: Sourced(value, _flag(name)) for name, value in given(cls, flags).items()}


def name_sources(message: str, sourced: Mapping[str, Sourced]) -> str:
    """Append to an error message that names flags where their values were set, if not by a flag."""
    named = [name for name in sourced if re.search(rf"{_flag(name)}(?![\w-])", message)]
    sources = [
        f"{_flag(name)} is set by {sourced[name].source}" for name in named if sourced[name].source != _flag(name)
    ]
    return f"{message} ({', '.join(sources)})" if sources else message


def make_settings(cls: type[T], values: Mapping[str, object]) -> T:
    """Build `cls`, and the dataclasses nested in it, from flat values. Raises ValueError that names a flag."""
    # names that no class knows: a TypeError
    own = {name: value for name, value in values.items() if name not in flat_fields(cls)}
    for field, kind in _own_fields(cls):
        if _is_nested(kind):
            own[field.name] = _nested(kind, values)
        elif field.name in values:
            own[field.name] = values[field.name]
    return cls(**own)


def _nested(cls: type[T], values: Mapping[str, object]) -> T:
    """Build a nested class. Its errors name fields, for users that embed it without a command line, so they are turned
    into flags here."""
    names = flat_fields(cls)
    try:
        return make_settings(cls, {name: value for name, value in values.items() if name in names})
    except ValueError as error:
        raise ValueError(_with_flags(str(error), names)) from None


def given(cls: type, flags: argparse.Namespace | Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the parsed values of the fields of `cls` that were given as flags. Raises SettingsError."""
    flags = vars(flags) if isinstance(flags, argparse.Namespace) else flags
    return {
        name: _parse(field, kind, flags[prefix + name], _flag(prefix + name))
        for name, (field, kind) in flat_fields(cls).items()
        if prefix + name in flags
    }


def to_argv(cls: type, values: Mapping[str, object]) -> list[str]:
    """Return flags that pass `values` (fields of `cls`) to another process. None is passed as `auto` for a number,
    since the other process's environment may set it, and left out for other types."""
    argv = []
    for name, (field, kind) in flat_fields(cls).items():
        value = values.get(name)
        if value is None:
            argv += [f"--{_dashed(name)}=auto"] if name in values and _may_be_auto(field, kind) else []
        elif kind is bool:
            argv.append(f"--{'' if value else 'no-'}{_dashed(name)}")
        else:
            argv.append(f"--{_dashed(name)}={','.join(value) if isinstance(value, tuple) else value}")
    return argv


def read_table(file: Path | str) -> dict[str, Any]:
    """Return the content of a TOML file. Raises SettingsError."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{file}: not TOML: {error}") from None


def from_table(
    cls: type,
    table: Mapping[str, object],
    where: Path | str,
    skip: Collection[str] = (),
    beside: Collection[str] = (),
) -> dict[str, Sourced]:
    """Return the fields of `cls` except `skip` that a table of a TOML file sets. `where` names the table in errors;
    `beside` lists other names that errors may suggest. Raises SettingsError."""
    fields = {name: field for name, field in flat_fields(cls).items() if name not in skip}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in fields:
            raise SettingsError(f"{where}: unknown setting {key!r}{_nearest(name, [*beside, *fields])}")
        if name in values:
            raise SettingsError(f"{where}: {key} is given twice, as {name} and {_dashed(name)}")
        values[name] = Sourced(_parse(*fields[name], value, f"{where}: {key}"), f"{where}: {key}")
    return values


def _from_env(cls: type, env: Mapping[str, str]) -> dict[str, object]:
    """Return the settings in the environment. Processes of several roles share it, so a name that resembles none of our
    fields is ignored."""
    fields, values = flat_fields(cls), {}
    for key in sorted(env):
        if not key.startswith(_ENV):
            continue
        name = key.removeprefix(_ENV).lower()
        if name in fields:
            if is_in_environment(name, env):
                values[name] = _parse(*fields[name], env[key], key)
        elif nearest := difflib.get_close_matches(name, fields, 1, 0.85):
            raise SettingsError(f"unknown setting {key}; did you mean {variable(nearest[0])}?")
    return values


def is_in_environment(name: str, env: Mapping[str, str] | None = None) -> bool:
    """Return whether the variable of a field is set. An empty variable is not, since compose files write
    `${NAME:-}`."""
    return bool((os.environ if env is None else env).get(variable(name)))


def _nearest(name: str, fields: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, fields, 1, 0.6)
    return f"; did you mean {nearest[0]}?" if nearest else f"; known are {', '.join(fields)}"


def flat_values(settings: Any) -> dict[str, object]:
    """Return the value of each field of a settings object, with the fields of a nested dataclass in its place."""
    found: dict[str, object] = {}
    for field, kind in _own_fields(type(settings)):
        value = getattr(settings, field.name)
        found |= flat_values(value) if _is_nested(kind) else {field.name: value}
    return found


def flat_fields(cls: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """Return each field with the type to parse, without `| None`, and the fields of a nested dataclass in its place."""
    found: dict[str, tuple[dataclasses.Field, Any]] = {}
    for field, kind in _own_fields(cls):
        found |= flat_fields(kind) if _is_nested(kind) else {field.name: (field, _plain(kind))}
    return found


def _is_nested(kind: Any) -> typing.TypeGuard[type]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _own_fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls) if field.init]


def _with_flags(text: str, names: Collection[str]) -> str:
    """Replace names of fields by flags, as a command line spells them: num_blocks becomes --num-blocks."""
    return re.sub(r"\b[a-z_]+\b", lambda word: f"--{_dashed(word[0])}" if word[0] in names else word[0], text)


def _plain(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint


def _parse(field: dataclasses.Field, kind: Any, value: object, where: str) -> object:
    if value in (None, "auto") and _may_be_auto(field, kind):
        return None  # not set
    if kind in (int, float, str, Path) and not isinstance(value, bool):
        parsed = _parse_scalar(kind, value, where)
    elif kind is bool:
        parsed = _parse_bool(value, where)
    elif typing.get_origin(kind) is tuple and isinstance(value, (str, list, tuple)):
        parts = value.split(",") if isinstance(value, str) else [str(_parse_scalar(str, part, where)) for part in value]
        parsed = tuple(part.strip() for part in parts if part.strip())
    else:
        raise SettingsError(f"{where}: {value!r} has the wrong type")
    choices = field.metadata.get("choices", ())
    for part in parsed if isinstance(parsed, tuple) else (parsed,):
        if choices and part not in choices:
            raise SettingsError(f"{where}: {part!r} is not one of {', '.join(choices)}")
    return parsed


def _may_be_auto(field: dataclasses.Field, kind: Any) -> bool:
    return field.default is None and kind in (int, float)


def _parse_scalar(kind: type, value: typing.Any, where: str) -> object:
    try:
        if isinstance(value, (list, dict)) or (kind is int and not isinstance(value, (int, str))):
            raise ValueError
        if value == "" and kind in (str, Path):  # an empty path would be the working directory
            raise SettingsError(f"{where} is empty; leave it out")
        return kind(value)
    except (ValueError, TypeError):
        what = {int: "a whole number", float: "a number"}.get(kind, "a text")
        raise SettingsError(f"{where}: {value!r} is not {what}") from None


def _parse_bool(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise SettingsError(f"{where}: {value!r} is neither true nor false")
    return text in _TRUE


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _flag(name: str) -> str:
    return f"--{_dashed(name)}"


def variable(name: str) -> str:
    """Return the environment variable of a field."""
    return f"{_ENV}{name.upper()}"
