"""Name the bottleneck of a run as its client saw it: the sender itself, or where answered requests spent their time."""

from collections import defaultdict
from collections.abc import Sequence

from baton.loadgen.outcome import Outcome
from baton.service.observe.bound import LEVERS, Bound, bound_of, worded

BUSY_SENDER = 0.9  # of a core: the sender is as fast as it can be
FREE_SENDER = 0.5  # with less it is not its own work that makes it late


def name_bound(answered: Sequence[Outcome], sender_cpu_share: float, lag_p99_s: float) -> Bound:
    """`lag_p99_s`: 0 unless the sender was too late to count."""
    if lag_p99_s or sender_cpu_share > BUSY_SENDER:
        late = f", {1e3 * lag_p99_s:.0f} ms late at p99" if lag_p99_s else ""
        what = "is the limit" if sender_cpu_share > FREE_SENDER else "does not get a core when it wants one"
        evidence = f"the load generator itself {what} (it took {sender_cpu_share:.0%} of a core{late})"
        return worded("client", evidence, LEVERS["client"])
    spent_s: dict[str, float] = defaultdict(float)
    for outcome in answered:
        if outcome.phases_s:
            for phase, value in outcome.phases_s.items():
                if phase != "transfer":
                    spent_s[phase] += value
            spent_s["decode"] += outcome.decode_s
    if answered and not spent_s:  # a server of OpenAI's API
        share = sum(outcome.ttft_s for outcome in answered) / sum(outcome.e2e_s for outcome in answered)
        told = f"{share:.0%} of the answered requests' time was before the first token; the server tells no phases."
        return Bound("nothing", told)
    return bound_of(spent_s)
