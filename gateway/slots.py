"""Bit strings of the index: bit n of a span's value says that the worker with slot n holds it."""

from collections.abc import Sequence

NUM_SLOTS = 1024
_NUM_BYTES = NUM_SLOTS // 8
_ALL = (1 << NUM_SLOTS) - 1


def longest_runs(values: Sequence[object]) -> dict[int, int]:
    """slot -> how many of the leading values have its bit set, for slots that have any. `values` are not trusted:
    what is not a short byte string counts as absent."""
    runs: dict[int, int] = {}
    alive = _ALL
    for length, value in enumerate(values):
        going_on = alive & _bits(value)
        for slot in _slots(alive & ~going_on) if length else ():
            runs[slot] = length
        alive = going_on
        if not alive:
            return runs
    return runs | {slot: len(values) for slot in _slots(alive)} if values else runs


def _bits(value: object) -> int:
    """Redis counts bits from the most significant one of the first byte."""
    if not isinstance(value, bytes) or len(value) > _NUM_BYTES:
        return 0
    return int.from_bytes(value.ljust(_NUM_BYTES, b"\0"), "big")


def _slots(bits: int) -> list[int]:
    slots = []
    while bits:
        lowest = bits & -bits
        slots.append(NUM_SLOTS - lowest.bit_length())
        bits ^= lowest
    return slots
