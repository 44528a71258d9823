"""Tables of states: printed for docs/states.md, and where a state is set."""

import ast
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

NOTHING = "ignore"


def state_table_markdown(states: type[Enum], events: type[Enum], table: Mapping[tuple[Any, Any], Any]) -> str:
    """Return a table for people: a row an event, a column a state; `x → y`: action and next state, `·`: nothing happens.
    A cell of `table` has `action`, a function, and `state`."""
    head = ["", *(state.value for state in states)]
    lines = [head, ["---"] * len(head)]
    for event in events:
        lines.append([f"**{event.value}**", *(_cell_text(state, table[state, event]) for state in states)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_text(state: Enum, cell: Any) -> str:
    name = cell.action.__name__.strip("_")
    if name == NOTHING:
        return "·"
    action = name.replace("_", " ")
    return action if cell.state is state else f"{action} → {cell.state.value}"


def assignments_of(attribute: str, package: ModuleType) -> list[str]:
    """Return the files of a package's folder that assign the attribute, one entry an assignment."""
    found = []
    for path in sorted(Path(package.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found += [path.name for each in targets if isinstance(each, ast.Attribute) and each.attr == attribute]
    return found
