"""Tables of states: printed for docs/states.md, and where a state is set."""

import ast
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

NOTHING = "ignore"


def state_table_markdown(
    states: type[Enum],
    events: type[Enum],
    table: Mapping[tuple[Any, Any], Any],
    states_of: Callable[[Any], Sequence[Enum]] = lambda cell: (cell.state,),
) -> str:
    """Return a table for people: a row an event, a column a state; `x → y, z`: action and the states that follow, `·`:
    nothing happens. A cell of `table` has `action`, a function, and `states_of` gives where it leads."""
    head = ["", *(state.value for state in states)]
    lines = [head, ["---"] * len(head)]
    for event in events:
        cells = ((state, table[state, event]) for state in states)
        lines.append(
            [f"**{event.value}**", *(_cell_text(state, cell.action, states_of(cell)) for state, cell in cells)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell_text(state: Enum, action: Callable, leads_to: Sequence[Enum]) -> str:
    name = action.__name__.strip("_")
    if name == NOTHING:
        return "·"
    words = name.replace("_", " ")
    return words if tuple(leads_to) == (state,) else f"{words} → {', '.join(each.value for each in leads_to)}"


def timeout_table_markdown(timeouts: Mapping[Any, Any]) -> str:
    """Return a table for people: a row a state, with the names of the functions `due` and `expire` of its timeout."""
    lines = [["", "waits until", "then"], ["---"] * 3]
    for state, timeout in timeouts.items():
        words = [function.__name__.replace("_", " ") for function in (timeout.due, timeout.expire)]
        lines.append([f"**{state.value}**", words[0], words[1] + (", or wait again" if timeout.repeats else "")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def assignments_of(attribute: str, package: ModuleType) -> list[str]:
    """Return the files of a package's folder that assign the attribute, one entry an assignment."""
    found = []
    for path in sorted(Path(package.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found += [path.name for each in targets if isinstance(each, ast.Attribute) and each.attr == attribute]
    return found
