"""Keep whether a proposer is on, what its trials may cost, and when it is tried again."""

from baton.engine.speculation.control.acceptance import AcceptanceRate

ALLOWANCE = 0.004  # share of the time of plain steps that may be spent on trying what does not pay as far as is known
FIRST_ALLOWANCE = 12.0  # in plain steps; also the most that is ever saved up
MAX_STEP_LOSS = 2.0  # in plain steps: the most that a step of a try is charged, as more is a disturbance
TRIAL_WIDTHS = (2, 1, 4)  # in turn: a single width gives no slope
LOOK_INTERVAL = 16  # steps between two looks at a proposer that is off, since sequences come and go
LOOK_SHARE = 0.01  # share of the time of plain steps that looks may take: the shorter such steps, the rarer the looks
# The same where no try can be paid: a look takes the demo half a plain step, with the call of several steps that it
# splits.
MAX_LOOK_INTERVAL = 128
# The longest interval of quick proposers in a small batch; after looks without gain the interval grows: 1, 2, 2, 4, 4,
# 8 steps.
MAX_QUICK_INTERVAL = 8
FIRST_WORTH = 2.0  # in plain steps: the gain assumed of a look before any was measured
WORTH_WEIGHT = 0.05  # weight of one more look in the mean
SMALL_BATCH = 4  # sequences; up to here a width is also chosen for every step
PROBE_INTERVAL = 32  # of this many steps with the proposer on, the first PROBES have another width than the best one
PROBES = 3


class ProposerState:
    """Hold the state of one proposer: whether it is off, its allowance in plain steps, and the current try. A try lasts
    for some steps with proposals, since a model may have a prompt to read first."""

    __slots__ = (
        "allowance", "earned_at", "num_tried", "num_to_try", "tried", "num_vain", "rests_until", "bucket", "decided_at",
        "best", "num_on", "look_steps", "look_worth", "interval",
    )  # fmt: skip

    def __init__(self):
        self.allowance = FIRST_ALLOWANCE
        self.earned_at = 0  # the last step counted in the allowance
        self.num_tried = 0  # steps
        self.num_to_try = 0  # steps of the current try
        self.tried: list[AcceptanceRate] = []  # acceptance rates of the sequences it is tried with
        self.num_vain = 0  # trials in a row without gain
        self.rests_until = self.bucket = 0  # the step; the batch size (in bits) for which it was found to be off
        self.interval = 0  # steps that it rests each time
        self.decided_at = self.best = 0  # the step of the last decision; the width decided
        self.num_on = 0  # steps
        self.look_steps = 0.0  # recent time of a look, in plain steps
        self.look_worth = FIRST_WORTH  # recent gain of a look beyond its time, in plain steps

    @property
    def is_trying(self) -> bool:
        return self.num_to_try > 0

    def is_resting(self, step: int, num_seqs: int) -> bool:
        """Return whether the proposer is off in this step, for a batch of the size for which it was found to be off."""
        return step < self.rests_until and self.bucket == num_seqs.bit_length() and not self.is_trying

    def num_resting(self, step: int, num_seqs: int, steps_a_call: int) -> int:
        """Return for how many steps from this one on it is not asked; at least 1. With several sequences, one that
        would rest as long as a call of `steps_a_call` is asked only after that call: splitting it takes the demo 0.3
        ms, two thirds of a step of four, and a proposal helps a lone sequence more than these."""
        if not self.is_resting(step, num_seqs):
            return 1
        num_steps = self.rests_until - step
        return max(num_steps, steps_a_call) if num_seqs > 1 and self.interval >= steps_a_call else num_steps

    def rest(self, step: int, num_seqs: int, is_quick: bool) -> None:
        """Rest, since it brings nothing in this step; the rests of a quick proposer grow."""
        self.num_vain += 1
        interval = MAX_QUICK_INTERVAL if is_quick and num_seqs <= SMALL_BATCH else LOOK_INTERVAL
        if not is_quick and not self.is_trying:
            interval = MAX_LOOK_INTERVAL
        interval = min(max(interval, round(self.look_steps / LOOK_SHARE)), MAX_LOOK_INTERVAL)
        if is_quick and self.look_worth > 0:
            interval = min(interval, 1 << min(self.num_vain // 2, 10))
        self.interval, self.rests_until, self.bucket = interval, step + interval, num_seqs.bit_length()

    def note_look(self, num_plain_steps: float) -> None:
        """Record the time of a look that found nothing."""
        self.look_steps += 0.2 * (num_plain_steps - self.look_steps)
        self.note_worth(-num_plain_steps)

    def note_worth(self, num_plain_steps: float) -> None:
        """Record the gain of a look together with the step that it led to."""
        self.look_worth += WORTH_WEIGHT * (num_plain_steps - self.look_worth)

    def choose_width(self) -> int:
        """Return the best width, or now and then twice or half of it, so that other widths stay measured."""
        self.num_vain = self.rests_until = 0
        self.stop()
        self.num_on += 1
        turn, step = divmod(self.num_on, PROBE_INTERVAL)
        if step >= PROBES:
            return self.best
        return 2 * self.best if turn % 2 else max(1, self.best // 2)

    def stop(self) -> None:
        """End the try."""
        self.num_to_try, self.tried = 0, []

    @property
    def width(self) -> int:
        """Return the width of the current try."""
        return TRIAL_WIDTHS[self.num_tried % len(TRIAL_WIDTHS)]

    def can_pay(self, step: int, num_plain_steps: float) -> bool:
        """Return whether the allowance, with what was earned up to `step`, pays for so many plain steps."""
        self.allowance = min(self.allowance + ALLOWANCE * (step - self.earned_at), FIRST_ALLOWANCE)
        self.earned_at = step
        return self.allowance > max(0.0, num_plain_steps)

    def note_try(self, lost: float, has_proposed: bool) -> None:
        """Record that a step of the try lost `lost` plain steps, or gained them (negative)."""
        self.allowance = min(self.allowance - min(lost, MAX_STEP_LOSS), FIRST_ALLOWANCE)
        self.num_tried += has_proposed
        self.num_to_try -= has_proposed
        if self.allowance <= 0 or not self.num_to_try:
            self.stop()
