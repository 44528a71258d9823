"""Name the bottleneck of a run as its client saw it: the sender itself, or what answered requests waited for."""

from collections import Counter
from collections.abc import Sequence

from baton.loadgen.outcome import Outcome
from baton.service.observe.bottleneck import SENDER_LEVER, Bottleneck, PromptFacts, bottleneck_of, worded

BUSY_SENDER = 0.9  # of a core: above it the sender is at its limit
FREE_SENDER = 0.5  # below it, its own work is not what makes it late


def name_bottleneck(answered: Sequence[Outcome], sender_cpu_share: float, lag_p99_s: float) -> Bottleneck:
    """Return the bottleneck of a run. `lag_p99_s` is 0 unless the sender was late enough to matter."""
    if lag_p99_s or sender_cpu_share > BUSY_SENDER:
        late = f", {1e3 * lag_p99_s:.0f} ms late at p99" if lag_p99_s else ""
        what = "is the limit" if sender_cpu_share > FREE_SENDER else "does not get a core when it wants one"
        evidence = f"the load generator itself {what} (it took {sender_cpu_share:.0%} of a core{late})"
        return worded("client", evidence, SENDER_LEVER)
    spent_s = Counter[str]()
    for outcome in answered:
        spent_s.update(outcome.bound_s)
    if answered and not spent_s:  # a server of OpenAI's API reports no phases
        share = sum(outcome.ttft_s for outcome in answered) / sum(outcome.e2e_s for outcome in answered)
        sentence = f"{share:.0%} of the answered requests' time was before the first token; the server tells no phases."
        return Bottleneck("nothing", sentence)
    num_prompt, num_cached = (sum(getattr(each, name) for each in answered) for name in ("num_prompt", "num_cached"))
    facts = PromptFacts((num_prompt - num_cached) / max(1, len(answered)), num_cached / max(1, num_prompt))
    return bottleneck_of(spent_s, facts)
