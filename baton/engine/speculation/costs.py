"""What steps and drafts take, as measured: forgetting, and robust against steps that were disturbed."""

from collections import deque

FORGET = 0.96  # weight that a measurement keeps when the next one comes
LAST = 15  # plain steps
OUTLIER = 2.0  # what took this much longer than expected was disturbed; twice running it is believed
BATCHING = 1.2  # of a draft, per doubling of its sequences
FIRST = 3  # measurements before anything is said: the first ones warm up
MIN_SPREAD = 0.04  # of the squared mean: with less, sizes are too alike for a slope to be told


class Typical:
    """The median of the last durations: plain steps are rare while it pays to speculate, and some are disturbed."""

    __slots__ = ("_last", "count", "value")

    def __init__(self):
        self._last: deque[float] = deque(maxlen=LAST)
        self.count, self.value = 0, 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self._last.append(seconds)
        self.value = sorted(self._last)[len(self._last) // 2]


class Line:
    """seconds = base + slope x size, least squares. The slope is kept while all sizes are alike."""

    __slots__ = ("count", "disturbed", "slope", "n", "x", "y", "xx", "xy")

    def __init__(self):
        self.count = 0
        self.disturbed = False
        self.slope: float | None = None
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        if self.count == 1:  # warms up
            return
        if self.count > FIRST:
            self.disturbed = seconds > OUTLIER * max(self.at(size), self.y / self.n) and not self.disturbed
            if self.disturbed:
                return
        self.n = FORGET * self.n + 1
        self.x = FORGET * self.x + size
        self.y = FORGET * self.y + seconds
        self.xx = FORGET * self.xx + size * size
        self.xy = FORGET * self.xy + size * seconds
        mean = self.x / self.n
        spread = self.xx / self.n - mean * mean
        if spread > MIN_SPREAD * mean * mean:
            self.slope = max(0.0, (self.xy / self.n - mean * self.y / self.n) / spread)

    @property
    def is_known(self) -> bool:
        return self.count >= FIRST

    def at(self, size: float) -> float:
        """While no slope is known half of it is taken for base."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        slope = self.slope if self.slope is not None else 0.5 * mean_y / mean_x
        return max(0.0, mean_y + slope * (size - mean_x))


class Costs:
    """By the number of sequences that decode, in powers of two. What is not known for one number is taken from the
    nearest that is."""

    def __init__(self):
        self.plain: dict[int, Typical] = {}
        self.extra: dict[int, Line] = {}  # of a verifying step beyond a plain one, by its proposals
        self.drafts: dict[str, dict[int, Line]] = {}  # of each proposer, by width

    def add_step(self, num_seqs: int, num_proposals: int, seconds: float) -> None:
        bucket = num_seqs.bit_length()
        plain = self.plain.setdefault(bucket, Typical())
        if num_proposals == 0:
            plain.add(seconds)
        elif plain.count:
            # To verify a token is never dearer than a plain step.
            extra_s = min(max(0.0, seconds - plain.value), (1 + num_proposals) * plain.value)
            self.extra.setdefault(bucket, Line()).add(num_proposals, extra_s)

    def add_draft(self, name: str, num_seqs: int, width: int, seconds: float) -> None:
        bucket = num_seqs.bit_length()
        if (plain_s := self.plain_s(num_seqs)) is not None:  # a draft is never larger than its target
            seconds = min(seconds, (1 + width) * plain_s)
        self.drafts.setdefault(name, {}).setdefault(bucket, Line()).add(width, seconds)

    def plain_s(self, num_seqs: int) -> float | None:
        """None: to be measured first."""
        plain = self.plain.get(num_seqs.bit_length())
        return plain.value if plain is not None and plain.count >= FIRST else None

    @property
    def extra_is_known(self) -> bool:
        return _nearest(self.extra, 1) is not None

    def is_known(self, name: str) -> bool:
        """Whether extra_s and draft_s can be told."""
        return self.extra_is_known and _nearest(self.drafts.get(name, {}), 1) is not None

    def extra_s(self, num_seqs: int, num_proposals: int) -> float:
        return self.extra[_nearest(self.extra, num_seqs.bit_length())].at(num_proposals)

    def draft_s(self, name: str, num_seqs: int, width: int) -> float:
        """A guess above what it may be where it was measured with fewer sequences only."""
        lines, bucket = self.drafts[name], num_seqs.bit_length()
        nearest = _nearest(lines, bucket)
        return lines[nearest].at(width) * BATCHING ** max(0, bucket - nearest)


def _nearest(lines: dict[int, Line], bucket: int) -> int | None:
    """The bucket whose line is known."""
    if (line := lines.get(bucket)) is not None and line.is_known:
        return bucket
    return min((other for other in lines if lines[other].is_known), key=lambda other: abs(other - bucket), default=None)
