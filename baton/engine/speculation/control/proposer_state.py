"""Keep whether a proposer is on: what its trials may cost, and when it is tried again."""

from baton.engine.speculation.control.acceptance import AcceptanceRate

ALLOWANCE = 0.004  # of the time of plain steps, for trying what does not pay as far as is known
FIRST_ALLOWANCE = 12.0  # plain steps; nor is more ever saved up
DISTURBED = 2.0  # plain steps: what a try took beyond that was no fault of it
TRIAL_WIDTHS = (2, 1, 4)  # in turn: one width alone gives no slope
LOOK_INTERVAL = 16  # steps between two looks at what is off: sequences come and go
LOOK_SHARE = 0.01  # of the time of plain steps, for looks: between two of them are more steps where these are short
# Where no try can be paid: a look takes the demo half a plain step, with the call of several steps that it cuts in two.
MAX_LOOK_INTERVAL = 128
# Of what costs next to nothing, in a small batch; while looks gain something two are ever further apart: 1, 2, 2, 4, 4,
# 8 steps.
VAIN_INTERVAL = 8
FIRST_WORTH = 2.0  # plain steps: what a look is taken to gain before it is known
WORTH_WEIGHT = 0.05  # of one more look
SMALL_BATCH = 4  # sequences; up to here a width is chosen for every step, too
PROBE_INTERVAL = 32  # steps in which a proposer is on; the first PROBES have another width than the best one
PROBES = 3


class ProposerState:
    """The state of one proposer: whether it is off, its allowance in plain steps, and the current try. A try lasts for
    some steps in which something was proposed: a model may have a prompt to read first."""

    __slots__ = (
        "allowance", "earned_at", "num_tried", "num_to_try", "tried", "num_vain", "rests_until", "bucket", "decided_at",
        "best", "num_on", "look_steps", "look_worth", "interval",
    )  # fmt: skip

    def __init__(self):
        self.allowance = FIRST_ALLOWANCE
        self.earned_at = 0  # step
        self.num_tried = 0  # steps
        self.num_to_try = 0  # steps of the current try
        self.tried: list[AcceptanceRate] = []  # whose sequences it is tried with
        self.num_vain = 0  # trials in a row without gain
        self.rests_until = self.bucket = 0  # step; of the batch for which it was found to be off
        self.interval = 0  # steps for which it rests
        self.decided_at = self.best = 0  # step; the width that is worth most
        self.num_on = 0  # steps
        self.look_steps = 0.0  # plain steps that a look took lately
        self.look_worth = FIRST_WORTH  # plain steps that a look gained lately, beyond what it took

    @property
    def is_trying(self) -> bool:
        return self.num_to_try > 0

    def is_resting(self, step: int, num_seqs: int) -> bool:
        return step < self.rests_until and self.bucket == num_seqs.bit_length() and not self.is_trying

    def num_resting(self, step: int, num_seqs: int, steps_a_call: int) -> int:
        """Return how many steps from this one on it is not asked; at least 1. Where several decode, what rests as long
        as a call of `steps_a_call` is asked behind one: a call that is cut in two takes the demo 0.3 ms more, two
        thirds of a step of four, and what is found helps one alone more than them."""
        if not self.is_resting(step, num_seqs):
            return 1
        num_steps = self.rests_until - step
        return max(num_steps, steps_a_call) if num_seqs > 1 and self.interval >= steps_a_call else num_steps

    def rest(self, step: int, num_seqs: int, is_quick: bool) -> None:
        """Note that it brings nothing in this step: it rests, what is quick ever longer."""
        self.num_vain += 1
        interval = VAIN_INTERVAL if is_quick and num_seqs <= SMALL_BATCH else LOOK_INTERVAL
        if not is_quick and not self.is_trying:
            interval = MAX_LOOK_INTERVAL
        interval = min(max(interval, round(self.look_steps / LOOK_SHARE)), MAX_LOOK_INTERVAL)
        if is_quick and self.look_worth > 0:
            interval = min(interval, 1 << min(self.num_vain // 2, 10))
        self.interval, self.rests_until, self.bucket = interval, step + interval, num_seqs.bit_length()

    def note_look(self, num_plain_steps: float) -> None:
        """Note what a look took of which nothing came."""
        self.look_steps += 0.2 * (num_plain_steps - self.look_steps)
        self.note_worth(-num_plain_steps)

    def note_worth(self, num_plain_steps: float) -> None:
        """Note what a look gained, and the step that it led to."""
        self.look_worth += WORTH_WEIGHT * (num_plain_steps - self.look_worth)

    def choose_width(self) -> int:
        """Return the best width, or now and then twice or half of it, since no other would be measured any more."""
        self.num_vain = self.rests_until = 0
        self.stop()
        self.num_on += 1
        turn, step = divmod(self.num_on, PROBE_INTERVAL)
        if step >= PROBES:
            return self.best
        return 2 * self.best if turn % 2 else max(1, self.best // 2)

    def stop(self) -> None:
        """The try is over."""
        self.num_to_try, self.tried = 0, []

    @property
    def width(self) -> int:
        """Return the width of the current trial."""
        return TRIAL_WIDTHS[self.num_tried % len(TRIAL_WIDTHS)]

    def can_pay(self, step: int, num_plain_steps: float) -> bool:
        self.allowance = min(self.allowance + ALLOWANCE * (step - self.earned_at), FIRST_ALLOWANCE)
        self.earned_at = step
        return self.allowance > max(0.0, num_plain_steps)

    def note_try(self, lost: float, has_proposed: bool) -> None:
        """Note that a step of the try lost `lost` plain steps, or gained them (negative)."""
        self.allowance = min(self.allowance - min(lost, DISTURBED), FIRST_ALLOWANCE)
        self.num_tried += has_proposed
        self.num_to_try -= has_proposed
        if self.allowance <= 0 or not self.num_to_try:
            self.stop()
