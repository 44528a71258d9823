"""The times of steps and drafts, as measured lately."""

from collections import deque
from itertools import repeat

from baton.protocol import MAX_DRAFT_TOKENS as SMALL

LAST = 9  # plain steps
OFTEN = 64  # measurements, from which on a curve is fitted again for every fourth
LAST_OF_SIZE = 9  # drafts, or verifying steps
FADE = 0.99  # of what was measured of a size, per later measurement of another: a cold one is forgotten
FADES = 500  # the most of them
BATCHING = 1.2  # of a draft, per doubling of its sequences
FIRST = 3  # measurements before any prediction: the first ones warm up
FIRST_PLAIN = 4  # of plain steps: all is held against them
WRONG = 1.5  # times as much, or as little, as a plain step was taken for


class RunningMedian:
    """The median of the last durations: plain steps are rare while it pays to speculate, and some are disturbed."""

    __slots__ = ("_last", "_every", "count", "value")

    def __init__(self, last: int = LAST, every: int = 1):
        """`last`: how many count; `every`: of this many one, once there are so many."""
        self._last: deque[float] = deque(maxlen=last)
        self._every = every
        self.count, self.value = 0, 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        if self.count == 2:  # the first one warmed up
            self._last.clear()
        if self.count > self._last.maxlen and self.count % self._every:  # it says nothing new, and takes 2 us
            return
        self._last.extend(repeat(seconds, times))
        self.value = sorted(self._last)[(len(self._last) - 1) // 2]


class CostCurve:
    """Seconds by size, through what is typical of each: kernels take rows in tiles, so that the fifth may be dear and
    the sixth free. A straight line, least squares, behind the sizes that were measured and above SMALL. Beyond twice
    the largest size so far it gives no value: a batch that grows, grows by as much and looks again."""

    __slots__ = ("count", "largest", "slope", "_base", "_small", "_sizes", "_seen_at")

    def __init__(self):
        self.count = self.largest = 0
        self.slope = self._base = 0.0
        self._small: list[float] = []  # of the sizes from 0 on
        self._sizes: dict[float, RunningMedian] = {}  # above SMALL two in an octave
        self._seen_at: dict[float, int] = {}  # count

    def add(self, size: int, seconds: float) -> None:
        self.count += 1
        self.largest = max(self.largest, size)
        middle: float = size
        if size > SMALL:
            half = 1 << (size.bit_length() - 2)  # of its octave
            middle = size - size % half + (half - 1) / 2
        self._sizes.setdefault(middle, RunningMedian(LAST_OF_SIZE, every=4)).add(seconds)
        self._seen_at[middle] = self.count
        if self.count < OFTEN or self.count % 4 == 0:
            self._fit()

    def _fit(self) -> None:
        """A size counts as often as it was seen lately, and from the third time on if any was seen so often. While
        there is but one, half of what it takes is taken for base."""
        known = sorted((size, typical) for size, typical in self._sizes.items() if typical.count >= FIRST)
        known = known or sorted(self._sizes.items())
        points = [(size, typical.value, self._weight(size)) for size, typical in known]
        n = x = y = xx = xy = 0.0
        for size, seconds, weight in points:
            n += weight
            x += weight * size
            y += weight * seconds
            xx += weight * size * size
            xy += weight * size * seconds
        self.slope = 0.5 * y / x if len(known) == 1 else max(0.0, (n * xy - x * y) / (n * xx - x * x))
        self._base = (y - self.slope * x) / n
        self._small = self._steps(_rising([point for point in points if point[0] <= SMALL]))

    def _weight(self, size: float) -> float:
        seen_ago = min(self.count - self._seen_at[size], FADES)
        return min(self._sizes[size].count, LAST_OF_SIZE) * FADE**seen_ago

    def _steps(self, known: list[tuple[int, float]]) -> list[float]:
        """Return the cost of each size up to the last known: linear between two known sizes."""
        if not known:
            return []
        size, seconds = 0, max(0.0, min(self._base, known[0][1]))
        steps = [seconds]
        for next_size, next_seconds in known:
            rise = max(0.0, next_seconds - seconds) / (next_size - size)
            steps += [seconds + rise * step for step in range(1, next_size - size + 1)]
            size, seconds = next_size, steps[-1]
        return steps

    @property
    def is_known(self) -> bool:
        return self.count >= FIRST

    def at(self, size: int) -> float:
        small = self._small
        if size < len(small):
            return small[size]
        if size <= SMALL and small:
            return small[-1] + self.slope * (size + 1 - len(small))
        return max(0.0, self._base + self.slope * size)


def _rising(points: list[tuple[float, float, float]]) -> list[tuple[int, float]]:
    """The costs nearest to `points` (size, seconds, weight) that never fall with the size, by pooling adjacent
    violators (Ayer et al., 1955): of a small size that was dear and a larger one that was not, neither is believed
    alone."""
    pools: list[tuple[float, float, list[float]]] = []  # seconds, weight, sizes
    for size, seconds, weight in points:
        sizes = [size]
        while pools and pools[-1][0] > seconds:
            before_s, before, before_sizes = pools.pop()
            seconds = (before_s * before + seconds * weight) / (before + weight)
            weight, sizes = before + weight, before_sizes + sizes
        pools.append((seconds, weight, sizes))
    return [(int(size), seconds) for seconds, _, sizes in pools for size in sizes]


class Costs:
    """By the number of sequences that decode, in powers of two. What is not known for one number is taken from the
    nearest that is."""

    def __init__(self):
        self.plain: dict[int, RunningMedian] = {}
        # Of a verifying step beyond a plain one by its proposals, for each proposer: behind a model that has drafted
        # the caches are cold. Shared, tries of heads made prompt lookup look three times as dear as it is.
        self.extra: dict[str, dict[int, CostCurve]] = {}
        self.drafts: dict[str, dict[int, CostCurve]] = {}  # of each proposer, by width
        self.reads: dict[str, RunningMedian] = {}  # of each proposer, seconds for a token that it has to read first

    def add_plain(self, num_seqs: int, seconds: float, times: int) -> None:
        plain = self.plain.setdefault(bucket := num_seqs.bit_length(), RunningMedian())
        before = plain.value
        plain.add(seconds, times)
        if max(before, plain.value) > WRONG * min(before, plain.value):
            for curves in self.extra.values():  # they were told from what it was taken for
                curves.pop(bucket, None)

    def add_verified(self, name: str, num_seqs: int, num_proposals: int, seconds: float) -> None:
        """Count a step with `num_proposals`, of `name` or of those asked before it too."""
        bucket = num_seqs.bit_length()
        if (plain := self.plain.get(bucket)) is not None:
            # To verify a token is never dearer than a plain step.
            extra_s = min(max(0.0, seconds - plain.value), (1 + num_proposals) * plain.value)
            self.extra.setdefault(name, {}).setdefault(bucket, CostCurve()).add(num_proposals, extra_s)

    def add_draft(self, name: str, num_seqs: int, width: int, seconds: float) -> None:
        bucket = num_seqs.bit_length()
        if (plain_s := self.plain_s(num_seqs)) is not None:  # a draft is never larger than its target
            seconds = min(seconds, (1 + width) * plain_s)
        self.drafts.setdefault(name, {}).setdefault(bucket, CostCurve()).add(width, seconds)

    def add_read(self, name: str, num_tokens: int, seconds: float) -> None:
        self.reads.setdefault(name, RunningMedian()).add(seconds / num_tokens)

    def read_s(self, name: str) -> float:
        """For a token; 0 where it was never measured."""
        return self.reads[name].value if name in self.reads else 0.0

    def plain_s(self, num_seqs: int) -> float | None:
        """None: to be measured first."""
        plain = self.plain.get(num_seqs.bit_length())
        return plain.value if plain is not None and plain.count >= FIRST_PLAIN else None

    def extra_is_known(self, name: str) -> bool:
        return _nearest(self.extra.get(name, {}), 1) is not None

    def draft_is_known(self, name: str) -> bool:
        return _nearest(self.drafts.get(name, {}), 1) is not None

    def extra_s(self, name: str, num_seqs: int, num_proposals: int) -> float:
        return self.extra_curve(name, num_seqs).at(num_proposals)

    def extra_curve(self, name: str, num_seqs: int) -> CostCurve:
        curves = self.extra[name]
        return curves[_nearest(curves, num_seqs.bit_length())]

    def draft_s(self, name: str, num_seqs: int, width: int) -> float:
        curve, more = self.draft_curve(name, num_seqs)
        return more * curve.at(width)

    def draft_curve(self, name: str, num_seqs: int) -> tuple[CostCurve, float]:
        """By width, and times how much: a guess above what it may be where it was measured with fewer sequences."""
        curves, bucket = self.drafts[name], num_seqs.bit_length()
        nearest = _nearest(curves, bucket)
        return curves[nearest], BATCHING ** max(0, bucket - nearest)


def _nearest(curves: dict[int, CostCurve], bucket: int) -> int | None:
    """The bucket whose curve is known."""
    if (curve := curves.get(bucket)) is not None and curve.is_known:
        return bucket
    known = (other for other in curves if curves[other].is_known)
    return min(known, key=lambda other: abs(other - bucket), default=None)
