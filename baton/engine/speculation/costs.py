"""What steps and drafts take, as measured: forgetting, and robust against steps that were disturbed."""

FORGET = 0.96  # weight that a measurement keeps when the next one comes
OUTLIER = 2.0  # what took this much longer than expected was disturbed: it counts as this much
DOWN = 2.0  # weight of what took less than expected: nothing is fast by accident
FIRST = 3  # measurements before anything is said: the first ones warm up
MIN_SPREAD = 0.04  # of the squared mean: with less, sizes are too alike for a slope to be told


class Mean:
    """Of durations. Of the first ones the best counts."""

    __slots__ = ("value", "count")

    def __init__(self):
        self.value = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= FIRST:
            self.value = seconds if self.count == 1 else min(self.value, seconds)
        else:
            change = min(seconds, OUTLIER * self.value) - self.value
            self.value += (1 - FORGET) * (DOWN if change < 0 else 1.0) * change


class Line:
    """seconds = base + slope x size, least squares. The slope is kept while all sizes are alike."""

    __slots__ = ("count", "slope", "n", "x", "y", "xx", "xy")

    def __init__(self):
        self.count = 0
        self.slope: float | None = None
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        if self.count == 1:  # warms up
            return
        weight = 1.0
        if self.count > FIRST:
            expected = self.at(size)
            seconds = min(seconds, OUTLIER * max(expected, self.y / self.n))
            weight = DOWN if seconds < expected else 1.0
        self.n = FORGET * self.n + weight
        self.x = FORGET * self.x + weight * size
        self.y = FORGET * self.y + weight * seconds
        self.xx = FORGET * self.xx + weight * size * size
        self.xy = FORGET * self.xy + weight * size * seconds
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
        self.plain: dict[int, Mean] = {}
        self.extra: dict[int, Line] = {}  # of a verifying step beyond a plain one, by its proposals
        self.drafts: dict[str, dict[int, Line]] = {}  # of each proposer, by width

    def add_step(self, num_seqs: int, num_proposals: int, seconds: float) -> None:
        bucket = num_seqs.bit_length()
        plain = self.plain.setdefault(bucket, Mean())
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

    def is_known(self, name: str) -> bool:
        """Whether extra_s and draft_s can be told."""
        return _nearest(self.extra, 1) is not None and _nearest(self.drafts.get(name, {}), 1) is not None

    def extra_s(self, num_seqs: int, num_proposals: int) -> float:
        return _nearest(self.extra, num_seqs.bit_length()).at(num_proposals)

    def draft_s(self, name: str, num_seqs: int, width: int) -> float:
        return _nearest(self.drafts[name], num_seqs.bit_length()).at(width)


def _nearest(lines: dict[int, Line], bucket: int) -> Line | None:
    line = lines.get(bucket)
    if line is not None and line.is_known:
        return line
    known = [other for other in lines if lines[other].is_known]
    return lines[min(known, key=lambda other: abs(other - bucket))] if known else None
