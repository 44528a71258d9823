"""Measure the recent times of steps, drafts and reading."""

from collections import deque
from itertools import repeat

MAX_SMALL_SIZE = 16  # sizes up to here, all that one sequence may propose, have their own medians
PLAIN_WINDOW = 9  # plain steps in the median
MANY_MEASUREMENTS = 64  # measurements after which a curve is fitted only for every fourth
SIZE_WINDOW = 9  # drafts or verifying steps in the median of one size
# Weight of a size's median per later measurement of another size, so that one measured cold is forgotten.
SIZE_FADE = 0.99
MAX_FADES = 500  # the most such measurements that count
BATCH_FACTOR = 1.2  # factor on a draft's time per doubling of its sequences
MIN_MEASUREMENTS = 3  # measurements before any prediction: the first ones warm up
MIN_PLAIN_MEASUREMENTS = 4  # the same of plain steps, against which everything else is compared
CHANGED_FACTOR = 1.5  # a plain step's median has changed if it rose or fell by this factor


class RunningMedian:
    """Keep the median of the last durations: plain steps are rare while speculation pays, and some are disturbed."""

    __slots__ = ("_last", "_every", "count", "value")

    def __init__(self, last: int = PLAIN_WINDOW, every: int = 1):
        """Keep the last `last` durations; once there are so many, take only every `every`-th."""
        self._last: deque[float] = deque(maxlen=last)
        self._every = every
        self.count, self.value = 0, 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` durations of `seconds` each."""
        self.count += times
        if self.count == 2:  # the first one was warming up
            self._last.clear()
        if self.count > self._last.maxlen and self.count % self._every:  # one more changes little and would take 2 us
            return
        self._last.extend(repeat(seconds, times))
        self.value = sorted(self._last)[(len(self._last) - 1) // 2]


class CostCurve:
    """Fit seconds by size. Sizes up to MAX_SMALL_SIZE have their own medians, since kernels take rows in tiles: the
    fifth row may be dear and the sixth free. Larger sizes, and those beyond the measured ones, use a least-squares
    line. It should not be asked beyond twice the largest size so far: a batch that grows that far is measured again."""

    __slots__ = ("count", "largest", "slope", "_base", "_small", "_sizes", "_seen_at")

    def __init__(self):
        self.count = self.largest = 0
        self.slope = self._base = 0.0
        self._small: list[float] = []  # seconds of sizes 0, 1, ...
        self._sizes: dict[float, RunningMedian] = {}  # above MAX_SMALL_SIZE, two sizes per octave
        self._seen_at: dict[float, int] = {}  # the value of `count` then

    def add(self, size: int, seconds: float) -> None:
        """Measure one step or draft of this size."""
        self.count += 1
        self.largest = max(self.largest, size)
        middle: float = size
        if size > MAX_SMALL_SIZE:
            half = 1 << (size.bit_length() - 2)  # half of the size's octave
            middle = size - size % half + (half - 1) / 2
        self._sizes.setdefault(middle, RunningMedian(SIZE_WINDOW, every=4)).add(seconds)
        self._seen_at[middle] = self.count
        if self.count < MANY_MEASUREMENTS or self.count % 4 == 0:
            self._fit()

    def _fit(self) -> None:
        """Fit the curve. A size weighs as much as it was measured lately. Sizes with fewer than MIN_MEASUREMENTS are
        left out, unless all have fewer. With a single size, half of its time is taken as the base."""
        known = sorted((size, typical) for size, typical in self._sizes.items() if typical.count >= MIN_MEASUREMENTS)
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
        self._small = self._steps(_rising([point for point in points if point[0] <= MAX_SMALL_SIZE]))

    def _weight(self, size: float) -> float:
        seen_ago = min(self.count - self._seen_at[size], MAX_FADES)
        return min(self._sizes[size].count, SIZE_WINDOW) * SIZE_FADE**seen_ago

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
        """Return whether there are enough measurements to predict from."""
        return self.count >= MIN_MEASUREMENTS

    def at(self, size: int) -> float:
        """Return the expected seconds of a size."""
        small = self._small
        if size < len(small):
            return small[size]
        if size <= MAX_SMALL_SIZE and small:
            return small[-1] + self.slope * (size + 1 - len(small))
        return max(0.0, self._base + self.slope * size)


def _rising(points: list[tuple[float, float, float]]) -> list[tuple[int, float]]:
    """Return the costs nearest to `points` (size, seconds, weight) that never fall as the size grows, by pooling
    adjacent violators (Ayer et al., 1955): a dear small size and a cheaper larger one are averaged."""
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
    """Hold all curves by the number of decoding sequences, in powers of two. Where none is known for a number, the
    nearest known one is used."""

    def __init__(self):
        self.plain: dict[int, RunningMedian] = {}
        # Seconds of a verifying step beyond a plain one, for each proposer: after a draft model ran the caches are
        # cold. With one curve for all, trying heads made prompt lookup look three times as dear as it is.
        self.extra: dict[str, dict[int, CostCurve]] = {}
        self.drafts: dict[str, dict[int, CostCurve]] = {}  # for each proposer, by width
        self.reads: dict[str, RunningMedian] = {}  # for each proposer, seconds per token that it must read first

    def add_plain(self, num_seqs: int, seconds: float, times: int) -> None:
        """Count `times` plain steps of `seconds` each, and forget what was measured against another plain time."""
        plain = self.plain.setdefault(bucket := num_seqs.bit_length(), RunningMedian())
        before = plain.value
        plain.add(seconds, times)
        if max(before, plain.value) > CHANGED_FACTOR * min(before, plain.value):
            for curves in self.extra.values():  # they were computed from the old plain time
                curves.pop(bucket, None)

    def add_verified(self, name: str, num_seqs: int, num_proposals: int, seconds: float) -> None:
        """Count a step that verified `num_proposals` of `name` and of the proposers asked before it."""
        bucket = num_seqs.bit_length()
        if (plain := self.plain.get(bucket)) is not None:
            # Verifying a token never takes longer than a plain step.
            extra_s = min(max(0.0, seconds - plain.value), (1 + num_proposals) * plain.value)
            self.extra.setdefault(name, {}).setdefault(bucket, CostCurve()).add(num_proposals, extra_s)

    def add_draft(self, name: str, num_seqs: int, width: int, seconds: float) -> None:
        """Measure a draft of `width` tokens for each of `num_seqs` sequences."""
        bucket = num_seqs.bit_length()
        if (plain_s := self.plain_s(num_seqs)) is not None:  # a draft model is never larger than its target
            seconds = min(seconds, (1 + width) * plain_s)
        self.drafts.setdefault(name, {}).setdefault(bucket, CostCurve()).add(width, seconds)

    def add_read(self, name: str, num_tokens: int, seconds: float) -> None:
        """Measure a proposer that read `num_tokens` tokens."""
        self.reads.setdefault(name, RunningMedian()).add(seconds / num_tokens)

    def read_s(self, name: str) -> float:
        """Return the seconds to read a token; 0 where that was never measured."""
        return self.reads[name].value if name in self.reads else 0.0

    def plain_s(self, num_seqs: int) -> float | None:
        """Return the seconds of a plain step; None where it has yet to be measured."""
        plain = self.plain.get(num_seqs.bit_length())
        return plain.value if plain is not None and plain.count >= MIN_PLAIN_MEASUREMENTS else None

    def extra_is_known(self, name: str) -> bool:
        """Return whether the cost of verifying a proposer's proposals is known for any number of sequences."""
        return _nearest(self.extra.get(name, {}), 1) is not None

    def draft_is_known(self, name: str) -> bool:
        """Return whether the cost of a proposer's drafts is known for any number of sequences."""
        return _nearest(self.drafts.get(name, {}), 1) is not None

    def extra_s(self, name: str, num_seqs: int, num_proposals: int) -> float:
        """Return the seconds of a step with so many proposals beyond a plain step."""
        return self.extra_curve(name, num_seqs).at(num_proposals)

    def extra_curve(self, name: str, num_seqs: int) -> CostCurve:
        """Return the curve of seconds beyond a plain step by proposals, the known one nearest to `num_seqs`."""
        curves = self.extra[name]
        return curves[_nearest(curves, num_seqs.bit_length())]

    def draft_s(self, name: str, num_seqs: int, width: int) -> float:
        """Return the seconds of a draft of `width` tokens for each of `num_seqs` sequences."""
        curve, more = self.draft_curve(name, num_seqs)
        return more * curve.at(width)

    def draft_curve(self, name: str, num_seqs: int) -> tuple[CostCurve, float]:
        """Return the curve by width, and a factor on it that is above 1 if it was measured with fewer sequences."""
        curves, bucket = self.drafts[name], num_seqs.bit_length()
        nearest = _nearest(curves, bucket)
        return curves[nearest], BATCH_FACTOR ** max(0, bucket - nearest)


def _nearest(curves: dict[int, CostCurve], bucket: int) -> int | None:
    """Return the known bucket nearest to this one; None where none is known."""
    if (curve := curves.get(bucket)) is not None and curve.is_known:
        return bucket
    known = (other for other in curves if curves[other].is_known)
    return min(known, key=lambda other: abs(other - bucket), default=None)
