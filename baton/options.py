"""Declare the options of a process: fields of a dataclass, with what a command line says of them."""

import dataclasses
from typing import Any


def option(help: str, default: Any = dataclasses.MISSING, *, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    """Declare a field of a settings class; without a default it must be given. `choices` are the values it may have."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})
