"""Bit strings of the index: bit n of a span's value says that the worker with slot n holds it.

A long prompt is looked up by samples. A worker that holds a span holds those before it, since caches evict the last
ones first, so a few spans tell nearly as much as all. The longest prefix is then looked up exactly, shorter ones are
known to within 16 spans. (256 keys of 10 million lie in 256 parts of Redis's memory: 0.7 ms at the median and 2 ms at
p99 were measured.)
"""

from collections.abc import Iterable, Iterator, Sequence

from gateway.prefix.prefix_matches import WorkerBits

NUM_SLOTS = 1024
_STEP = 16  # spans between two samples
_ALL = 32  # spans of a prompt that is short enough not to be sampled
NUM_BYTES = NUM_SLOTS // 8


def worker_bits_of(holders: Sequence[object]) -> WorkerBits:
    """Return the bits of the workers that hold the slots, one bit each. `holders` is not trusted: a value that is not a
    byte string names no worker."""
    bit_of = {holder: _bit(slot) for slot, holder in enumerate(holders) if isinstance(holder, bytes)}
    return WorkerBits.of({bit: worker for worker, bit in bit_of.items()})


def mask_of(slots: Iterable[int]) -> int:
    """Return an integer with the bits of these slots set, as in bit_sets."""
    return sum(1 << _bit(slot) for slot in slots)


def slots_in(bits: int) -> Iterator[int]:
    """Yield the slots whose bits are set."""
    while bits:
        lowest = bits & -bits
        yield _bit(lowest.bit_length() - 1)
        bits ^= lowest


def _bit(slot: int) -> int:
    """Return the bit of a slot, and likewise the slot of a bit."""
    return NUM_SLOTS - 1 - slot


def bit_sets(values: Sequence[object]) -> Iterator[int]:
    """Yield the slots of each value as an integer, slot n as bit NUM_SLOTS - 1 - n: Redis counts from the most
    significant bit of the first byte.

    Consecutive spans mostly have the same holders, so equal bytes are read once. `values` are not trusted: one that is
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
    """Return the numbers of leading spans that are sampled, by looking up the last of them: for a short prompt every
    number, for a long one 1, 2, 4, 8, 16, 32, 48 and so on, and the number of all spans."""
    if num_spans <= _ALL:
        return range(1, num_spans + 1)
    return [1, 2, 4, 8, *range(_STEP, num_spans, _STEP), num_spans]


def last_held(sampled: Iterable[int], alive: int) -> int:
    """Return the most leading samples that a single worker holds. `alive`: the bits of the workers."""
    num = 0
    for bits in sampled:
        alive &= bits
        if not alive:
            break
        num += 1
    return num


def spread(sampled: Iterable[int], ends: Iterable[int]) -> Iterator[int]:
    """Yield the holders of each span, which are those of the next sample."""
    begin = 0
    for bits, end in zip(sampled, ends):
        for _ in range(begin, end):
            yield bits
        begin = end
