"""The measured speed of workers: seconds of a prompt by its tokens, of an output token by the sequences beside it, of
moved KV by its bytes. A line is fitted to the samples of all workers, and each worker has a factor by which it is
slower."""

from typing import NamedTuple

_HALF_LIFE_S = 30.0  # after which a sample counts half as much
_LEAST_WEIGHT = 0.5  # a fit with less weight has only old samples, and is not trusted
# Imagined samples of a worker as fast as the others, added to its own. Lines fitted to the few samples of one worker
# differ by chance: in bench/routing.py the one that had looked slow got a quarter of the mean's requests, the one that
# had looked fast 1.37 times the mean.
_PRIOR_SAMPLES = 8.0
_RIDGE = 0.05  # share of the squared mean: how far the samples must spread before their slope counts
_MOST_OFF = 4.0  # a single stall must not look like a slow worker; a slow worker still shows after a few samples
_PACE_S = 0.5  # how long an estimate is reused
_LONGEST_S = 3600.0  # a longer time, or NaN, is no measurement
_RATED_TOKENS = 128  # a shorter prompt says more about round trips than about the rate


class Pace(NamedTuple):
    """Costs in seconds: a fixed part and a part for each token, sequence or byte. The defaults hold until something is
    measured. While `transfer_byte_s` is 0, routing goes by where the two workers are."""

    prefill_base_s: float = 0.005
    prefill_token_s: float = 1 / 5_000
    decode_base_s: float = 0.02
    decode_sequence_s: float = 0.0005
    transfer_base_s: float = 0.005
    transfer_byte_s: float = 0.0

    def prefill_s(self, num_tokens: float) -> float:
        """Return the seconds to compute `num_tokens` of a prompt."""
        return self.prefill_base_s + self.prefill_token_s * num_tokens

    def tpot_s(self, num_sequences: float) -> float:
        """Return the seconds of one output token of each of `num_sequences` in a batch."""
        return self.decode_base_s + self.decode_sequence_s * num_sequences


class Fit:
    """A least-squares fit y = base + slope x with base and slope >= 0, over samples whose weight halves every 30 s. If
    all x are equal, the slope is that of a line from (0, the prior base)."""

    __slots__ = ("base", "slope", "_prior_base", "_sums", "_at")

    def __init__(self, prior_base: float, prior_slope: float):
        self.base, self.slope, self._prior_base = prior_base, prior_slope, prior_base
        self._sums, self._at = (0.0,) * 5, 0.0

    def add(self, x: float, y: float, at: float) -> None:
        """Add a sample; `at` is time.monotonic()."""
        if self._sums[0] > _LEAST_WEIGHT:
            y = min(y, _MOST_OFF * (self.base + self.slope * x))
        keep = _kept(self._at, at)
        seen = (1.0, x, y, x * x, x * y)
        self._sums = sums = tuple(keep * old + new for old, new in zip(self._sums, seen, strict=True))
        self._at = max(at, self._at)
        weight = sums[0]
        mean_x, mean_y = sums[1] / weight, sums[2] / weight
        if mean_x < 1e-6:
            self.base = mean_y
            return
        ridge = _RIDGE * mean_x * mean_x
        prior = max(0.0, mean_y - self._prior_base) / mean_x
        variance, covariance = sums[3] / weight - mean_x * mean_x, sums[4] / weight - mean_x * mean_y
        self.slope = min(max((covariance + ridge * prior) / (variance + ridge), 0.0), mean_y / mean_x)
        self.base = max(0.0, mean_y - self.slope * mean_x)


class _Factor:
    """The factor by which a worker is slower than expected, by its recent samples; 1 without any."""

    __slots__ = ("_weight", "_seconds", "_expected_s", "_at")

    def __init__(self) -> None:
        self._weight = self._seconds = self._expected_s = self._at = 0.0

    def add(self, expected_s: float, seconds: float, at: float) -> None:
        if expected_s > 0:
            seconds = min(seconds, _MOST_OFF * self.value(at) * expected_s)
            keep = _kept(self._at, at)
            self._weight, self._seconds = keep * self._weight + 1, keep * self._seconds + seconds
            self._expected_s, self._at = keep * self._expected_s + expected_s, max(at, self._at)

    def value(self, at: float) -> float:
        if not self._expected_s:
            return 1.0
        weight = self._weight * _kept(self._at, at)
        return (weight * self._seconds / self._expected_s + _PRIOR_SAMPLES) / (weight + _PRIOR_SAMPLES)


class PaceEstimator:
    """Estimate the speed of one worker, relative to `fleet`; with `fleet` None, that of a whole fleet."""

    def __init__(self, fleet: "PaceEstimator | None" = None):
        default = Pace()
        self._fits = {
            "prefill": Fit(default.prefill_base_s, default.prefill_token_s),
            "decode": Fit(default.decode_base_s, default.decode_sequence_s),
            "transfer": Fit(default.transfer_base_s, default.transfer_byte_s),
        }
        self._fleet = fleet
        self._factors = {name: _Factor() for name in self._fits}
        self._pace, self._pace_at = default, -_PACE_S

    def note_prefill(self, num_tokens: int, seconds: float, at: float) -> None:
        """Add a sample: computing `num_tokens` of a prompt took `seconds`."""
        if num_tokens >= _RATED_TOKENS and 0 < seconds < _LONGEST_S:
            self._note("prefill", num_tokens, seconds, at)

    def note_decode(self, num_sequences: int, tpot_s: float, at: float) -> None:
        """Add a sample: each token of one of `num_sequences` took `tpot_s`."""
        if 0 < tpot_s < _LONGEST_S:
            self._note("decode", num_sequences, tpot_s, at)

    def note_transfer(self, num_bytes: int, seconds: float, at: float) -> None:
        """Add a sample: moving `num_bytes` took `seconds`. These are the bytes left when the prompt had been read;
        earlier ones moved while it was read."""
        if 0 < seconds < _LONGEST_S:
            self._note("transfer", num_bytes, seconds, at)

    def pace(self, at: float) -> Pace:
        """Return the costs at `at`, or as they were _PACE_S before at most."""
        if at - self._pace_at >= _PACE_S:
            self._pace, self._pace_at = self._pace_now(at), at
        return self._pace

    def _pace_now(self, at: float) -> Pace:
        if self._fleet is None:
            return Pace(*(part for fit in self._fits.values() for part in (fit.base, fit.slope)))
        fleet = self._fleet.pace(at)
        prefill, decode, transfer = (factor.value(at) for factor in self._factors.values())
        return Pace(
            prefill * fleet.prefill_base_s,
            prefill * fleet.prefill_token_s,
            decode * fleet.decode_base_s,
            decode * fleet.decode_sequence_s,
            transfer * fleet.transfer_base_s,
            transfer * fleet.transfer_byte_s,
        )

    def _note(self, name: str, x: float, seconds: float, at: float) -> None:
        self._pace_at = -_PACE_S
        if self._fleet is None:
            self._fits[name].add(x, seconds, at)
            return
        self._fleet._note(name, x, seconds, at)
        fit = self._fleet._fits[name]
        self._factors[name].add(fit.base + fit.slope * x, seconds, at)


class RecentLoad:
    """The work given to a worker recently, as a share of its time."""

    __slots__ = ("_seconds", "_at")

    def __init__(self) -> None:
        self._seconds = self._at = 0.0

    def add(self, seconds: float, at: float) -> None:
        """Add `seconds` of work, or remove them if they are negative."""
        self._seconds, self._at = max(0.0, self._left(at) + seconds), at

    def utilization(self, at: float) -> float:
        """Return the share of its time that the worker was given work for; 1 is all of it."""
        # A worker that is always busy settles at half-life / ln 2 seconds.
        return self._left(at) * 0.693 / _HALF_LIFE_S

    def _left(self, at: float) -> float:
        return self._seconds * _kept(self._at, at)


def _kept(then: float, at: float) -> float:
    """Return the share of a sample's weight that is left at `at`."""
    return 0.5 ** (max(0.0, at - then) / _HALF_LIFE_S)
