"""From a plan that fails to a small one that fails alike: without what it does not need, and with smaller numbers.

A plan is plain JSON. What obeys it must make sense of any part of one: what names nothing does nothing.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

Plan = dict[str, Any]
Path = tuple[str | int, ...]
FIXED = ("seed", "id")  # names, not sizes


class Shrinker:
    """`fails(plan)` says how a plan fails, in words that are the same for the same fault; empty: it does not."""

    def __init__(self, fails: Callable[[Plan], str], max_tries: int = 2000):
        self._fails, self._tries_left = fails, max_tries

    def shrink(self, plan: Plan) -> Plan:
        """Return the smallest plan found; `plan` itself where it does not fail again."""
        self._wanted = self._fails(plan)
        if not self._wanted:
            return plan
        size = None
        while size != (size := _size(plan)) and self._tries_left > 0:
            for path in sorted(_lists(plan), key=len):
                plan = self._with_less(plan, path)
            for path in list(_numbers(plan)):
                plan = self._with_smaller(plan, path)
        return plan

    def _still(self, plan: Plan) -> bool:
        self._tries_left -= 1
        return self._tries_left >= 0 and self._fails(plan) == self._wanted

    def _with_less(self, plan: Plan, path: Path) -> Plan:
        """Take pieces out of one list, halves first, then ever smaller ones, from its end."""
        if (items := _at(plan, path)) is None:  # it went with a list around it
            return plan
        piece = len(items)
        while piece:
            end = len(items)
            while end > 0:
                left = items[: max(0, end - piece)] + items[end:]
                smaller = _with(plan, path, left)
                if self._still(smaller):
                    plan, items = smaller, left
                end -= piece
            piece //= 2
        return plan

    def _with_smaller(self, plan: Plan, path: Path) -> Plan:
        number = _at(plan, path)
        while number:
            smaller = next(
                (found for value in (0, number // 2, number - 1)
                 if 0 <= value < number and self._still(found := _with(plan, path, value))),
                None,
            )  # fmt: skip
            if smaller is None:
                return plan
            plan, number = smaller, _at(smaller, path)
        return plan


def _lists(value: Any, path: Path = ()) -> Iterator[Path]:
    """Return paths of lists of which items may go: lists of lists or of dicts."""
    for key, item in _items(value):
        if isinstance(item, list) and all(isinstance(each, list | dict) for each in item):
            yield (*path, key)
        yield from _lists(item, (*path, key))


def _numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    for key, item in _items(value):
        if isinstance(item, int) and not isinstance(item, bool) and item > 0 and key not in FIXED:
            yield (*path, key)
        yield from _numbers(item, (*path, key))


def _items(value: Any) -> list:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _at(plan: Plan, path: Path) -> Any:
    for key in path:
        try:
            plan = plan[key]
        except (LookupError, TypeError):
            return None
    return plan


def _with(plan: Plan, path: Path, value: Any) -> Plan:
    changed = copy.deepcopy(plan)
    _at(changed, path[:-1])[path[-1]] = value
    return changed


def _size(plan: Any) -> int:
    """Smaller is simpler: items, and the sizes of numbers."""
    if isinstance(plan, int):
        return abs(int(plan))
    return sum(1 + _size(item) for _, item in _items(plan))
