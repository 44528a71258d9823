"""Bit strings of the index: bit n of a span's value says that the worker with slot n holds it.

A long prompt is looked up by samples. A worker that holds a span holds those before it, since caches evict the last
ones first, so a few spans tell nearly as much as all: the longest prefix is then looked up exactly, shorter ones are
known to within 16 spans. (256 keys of 10 million are 256 places in Redis's memory: 0.7 ms at the median, 2 ms at p99
were seen.)
"""

from collections.abc import Iterable, Iterator, Sequence

from gateway.prefix.prefix_matches import WorkerBits

NUM_SLOTS = 1024
_STEP = 16  # spans between two samples
_ALL = 32  # spans that are not sampled
NUM_BYTES = NUM_SLOTS // 8


def places_of(holders: Sequence[object]) -> WorkerBits:
    """Return the slot of each worker, one each. `holders` is not trusted: a value that is not a byte string names no
    worker."""
    place_of = {holder: _place(slot) for slot, holder in enumerate(holders) if isinstance(holder, bytes)}
    return WorkerBits.of({place: worker for worker, place in place_of.items()})


def mask_of(slots: Iterable[int]) -> int:
    """Return the bits of these slots, as in bit_sets."""
    return sum(1 << _place(slot) for slot in slots)


def slots_in(bits: int) -> Iterator[int]:
    """Return the slots whose bits are set."""
    while bits:
        lowest = bits & -bits
        yield _place(lowest.bit_length() - 1)
        bits ^= lowest


def _place(slot: int) -> int:
    return NUM_SLOTS - 1 - slot


def bit_sets(values: Sequence[object]) -> Iterator[int]:
    """Return for each value its slots as an integer, slot n as bit NUM_SLOTS - 1 - n: Redis counts from the most
    significant bit of the first byte.

    Spans in a row mostly have the same holders, and equal bytes are read once. `values` are not trusted: one that is
    not a short byte string counts as absent."""
    last, bits = None, 0
    for value in values:
        if value != last:
            last, bits = value, _bits(value)
        yield bits


def _bits(value: object) -> int:
    if not isinstance(value, bytes) or len(value) > NUM_BYTES:
        return 0
    return int.from_bytes(value.ljust(NUM_BYTES, b"\0"), "big")


def sampled_ends(num_spans: int) -> Sequence[int]:
    """Return numbers of leading spans whose last one is looked up: all of a short prompt; of a long one 1, 2, 4, 8, 16,
    32, 48 and so on, and all of them."""
    if num_spans <= _ALL:
        return range(1, num_spans + 1)
    return [1, 2, 4, 8, *range(_STEP, num_spans, _STEP), num_spans]


def last_held(sampled: Iterable[int], alive: int) -> int:
    """Return how many leading samples have a holder that holds all samples before, too."""
    num = 0
    for bits in sampled:
        alive &= bits
        if not alive:
            break
        num += 1
    return num


def spread(sampled: Iterable[int], ends: Iterable[int]) -> Iterator[int]:
    """Return the holders of each span, taken from the next sample."""
    begin = 0
    for bits, end in zip(sampled, ends):
        for _ in range(begin, end):
            yield bits
        begin = end
