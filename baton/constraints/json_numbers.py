"""Numbers of a JSON schema that llguidance would not keep exactly. It reads each as a 64-bit float, those of 16 digits
and more not always as the nearest one, and then converts whole ones to 64-bit integers."""

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard

_STEPS = {"minimum": 0, "maximum": 0, "exclusiveMinimum": 1, "exclusiveMaximum": -1}  # from a bound to the first inside
_MAX_POWER = 308  # of ten, in floating point
_NOT_EXACT = (
    "whole numbers beyond 2**53 are not exact, this one would be {}: give one that is exact, or ask for a string"
)
_NOT_READ = "this number would be {}: give one of 15 digits, which are exact, or ask for a string"
_NOT_OUTSIDE = "would not keep out the bound itself, as the other has the same whole part: give minimum and maximum"


def check_numbers(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the problem with the numbers of a schema, apart from its inner schemas, as (path, reason), or None."""
    for keyword, value in schema.items():
        if keyword in _STEPS or keyword in ("const", "enum"):
            for path, number in values_in(f"/{keyword}", value):
                if not _is_number(number) or abs(number) == math.inf:
                    continue
                if abs(number) >= 2**53:
                    if (found := _as_kept(keyword, int(number))) != number:
                        return path, _NOT_EXACT.format(found)
                elif keyword not in _STEPS and (found := _as_read(number)) != number:
                    return path, _NOT_READ.format(found)
    return _check_open_bounds(schema)


def with_multiples(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose bounds are multiples of its `multipleOf`. With a bound of more digits the library would
    exclude numbers that begin with the same digits."""
    step, kept = schema.get("multipleOf"), {**schema}
    if not _is_number(step) or not 0 < step < math.inf or _STEPS.keys().isdisjoint(schema):
        return kept
    numerator, denominator = _as_ratio(step)
    for keyword, tighter, sign in (("minimum", max, 1), ("maximum", min, -1)):
        open_name = f"exclusive{keyword.capitalize()}"
        bound, _ = _bound(schema, keyword, open_name, tighter)
        if not abs(bound) < 2**53:  # there is no bound, or its digits are not exact
            continue
        bound_numerator, bound_denominator = _as_ratio(bound)
        num_steps, rest = divmod(sign * bound_numerator * denominator, bound_denominator * numerator)
        inner = sign * (num_steps + 1) * numerator  # by the denominator: the next multiple inside
        value = inner / denominator if inner % denominator else inner // denominator
        value_numerator, value_denominator = _as_ratio(value)
        if rest and value_numerator * denominator == inner * value_denominator:
            kept.pop(open_name, None)
            kept[keyword] = value
    return kept


def _as_ratio(number: float) -> tuple[int, int]:
    """Return a number, as its digits say it, as a numerator and a denominator."""
    return (number, 1) if isinstance(number, int) else Decimal(repr(number)).as_integer_ratio()


def values_in(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the scalars within a value of JSON, with their paths."""
    waiting = [(path, value)]
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, dict):
            waiting += [(f"{path}/{name[:40]}", each) for name, each in found.items()]
        elif isinstance(found, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(found)]
        else:
            yield path, found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_kept(keyword: str, number: int) -> int:
    """Return the whole number that the library would enforce instead of this one. A bound may become narrower; then
    return the number itself."""
    if keyword not in _STEPS:
        return _as_integer(number)
    step = _STEPS[keyword]
    kept = _as_integer(number, step) - step, _as_digits(number)
    return max(number, *kept) if keyword.endswith("aximum") else min(number, *kept)


def _as_integer(number: int, step: int = 0) -> int:
    """Return what the library makes of a whole number, and a step from it, in an integer schema."""
    return _clamped(int(_as_float(number) + step))


def _as_digits(number: int) -> int:
    """Return what the library makes of a whole number in a schema of any numbers: the fewest digits that give the same
    float."""
    return _clamped(int(Decimal(repr(_as_float(number)))))


def _as_float(number: int) -> float:
    return float(max(-(2**64), min(number, 2**64)))


def _as_read(number: float) -> float:
    """Return what the library reads for a number: it rounds the digits and their power of ten separately."""
    if len(text := repr(number)) <= 16 and "e" not in text:  # as most, of which there may be very many
        return number
    sign, digits, exponent = Decimal(text).as_tuple()
    read = float("".join(map(str, digits)))
    if (power := -int(exponent)) > _MAX_POWER:
        read, power = read / 10.0**_MAX_POWER, power - _MAX_POWER
    return (-read if sign else read) / float(f"1e{power}")


def _clamped(number: int) -> int:
    return max(-(2**63), min(number, 2**63 - 1))


def _check_open_bounds(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the exclusive bound that the library would not exclude, as (path, reason), or None. It splits a number
    into its whole part and its other digits, and lets the latter be omitted after a bound that has none."""
    if _STEPS.keys().isdisjoint(schema):  # a short cut for most schemas, as there may be very many
        return None
    low, is_low_open = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _bound(schema, "maximum", "exclusiveMaximum", min)
    if is_low_open and 0 <= low == low // 1 and low < high < low + 1:
        return "/exclusiveMinimum", _NOT_OUTSIDE
    if is_high_open and 0 >= high == high // 1 and high - 1 < low < high:
        return "/exclusiveMaximum", _NOT_OUTSIDE
    return None


def _bound(
    schema: Mapping[str, Any], closed_name: str, open_name: str, tighter: Callable[..., float]
) -> tuple[float, bool]:
    """Return the tighter of two bounds, NaN for none, and whether it is exclusive."""
    closed, opened = schema.get(closed_name), schema.get(open_name)
    if opened is True:  # as in draft 4
        opened = closed
    bound = tighter(filter(_is_number, (closed, opened)), default=math.nan)
    return bound, bound == opened
