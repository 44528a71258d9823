"""What bounds a run, in one sentence: where the answered requests spent their time, and the one lever to try."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.loadgen.outcome import Outcome

BUSY_SENDER = 0.9  # of a core: the sender is as fast as it can be

LEVERS = {
    "client": "give the load generator more --processes, or a machine of its own",
    "queue": "add the worker that the queue is in front of, or lower the rate",
    "prefill compute": "add prefill workers, or let prompts share more of their prefix",
    "transfer": "bring the workers onto one host (shm, cuda_ipc) or a faster network, or store KV in int8",
    "decode bandwidth": "quantize weights (int8, int4) or turn speculation on; for more streams add decode workers",
}
_QUEUES = {"admit": "decode", "prefill_queue": "prefill", "decode_queue": "decode"}


class Bound(NamedTuple):
    name: str  # one of LEVERS, or "nothing" where nothing was answered
    sentence: str


def name_bound(answered: Sequence[Outcome], sender_cpu_share: float, lag_p99_s: float) -> Bound:
    """`lag_p99_s`: 0 unless the sender was too late to count."""
    if lag_p99_s or sender_cpu_share > BUSY_SENDER:
        why = f"{sender_cpu_share:.0%} of a core" + (f", {1e3 * lag_p99_s:.0f} ms late at p99" if lag_p99_s else "")
        return _bound("client", f"the load generator itself is the limit ({why})")
    spent = _spent(answered)
    total = sum(spent.values())
    if not total:
        return Bound("nothing", "No request was answered: nothing can be said of what bounds the run.")
    name = max(spent, key=lambda each: spent[each])
    evidence = f"{spent[name] / total:.0%} of the answered requests' time"
    if name == "queue":
        queues = {phase: _sum(answered, phase) for phase in _QUEUES}
        phase = max(queues, key=lambda each: queues[each])
        return _bound(name, f"requests wait in queues ({evidence}), mostly for a {_QUEUES[phase]} worker")
    words = {
        "prefill compute": f"reading prompts takes the most ({evidence})",
        "transfer": f"decoding waits for KV that is still on its way ({evidence})",
        "decode bandwidth": f"writing tokens takes the most ({evidence})",
    }
    return _bound(name, words[name])


def _bound(name: str, evidence: str) -> Bound:
    return Bound(name, f"Bound by {name}: {evidence}. Try this: {LEVERS[name]}.")


def _spent(answered: Sequence[Outcome]) -> dict[str, float]:
    """Seconds by bound. After the second message only steps are left."""
    steps_s = sum(
        max(0.0, outcome.e2e_s - sum(value for phase, value in outcome.phases_s.items() if phase != "transfer"))
        for outcome in answered
        if outcome.phases_s
    )
    return {
        "queue": sum(_sum(answered, phase) for phase in _QUEUES),
        "prefill compute": _sum(answered, "prefill"),
        "transfer": _sum(answered, "kv_wait"),
        "decode bandwidth": _sum(answered, "first_step") + steps_s,
    }


def _sum(answered: Sequence[Outcome], phase: str) -> float:
    return sum(outcome.phases_s.get(phase, 0.0) for outcome in answered)
