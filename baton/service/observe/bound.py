"""Name what bounds a run, in one sentence: where requests spent their time, and the one lever to try."""

from collections.abc import Mapping
from typing import NamedTuple

LEVERS = {
    "client": "give the load generator more --processes, or a machine of its own",
    "queue": "add a worker of the role that requests queue for, or lower the rate",
    "prefill compute": "add prefill workers, or let prompts share more of their prefix",
    "transfer": "move the workers to one host (shm, cuda_ipc) or a faster network, or store KV in int8",
    "decode bandwidth": "quantize weights (int8, int4) or turn speculation on; for more streams add decode workers",
}
MORE_LOAD = "send more requests, or more at once: the stack has room"  # the client's lever, as the stack sees it
QUEUES = {"admit": "decode", "prefill_queue": "prefill", "decode_queue": "decode"}
PHASES = {
    "queue": tuple(QUEUES),
    "prefill compute": ("prefill",),
    "transfer": ("kv_wait",),
    "decode bandwidth": ("first_step", "decode"),
}
FULL_HOST = 0.9  # busy: one more worker would only share its cores
_MORE_WORKERS = ("queue", "prefill compute", "decode bandwidth")  # whose lever is another worker
LEAST_AT_ONCE = 0.5  # requests in the stack, in the mean: with fewer it waits for its clients
_EVIDENCE = {
    "queue": "requests wait in queues ({share})",
    "prefill compute": "reading prompts takes the most ({share})",
    "transfer": "decoding waits for KV that is still on its way ({share})",
    "decode bandwidth": "writing tokens takes the most ({share})",
}


class Bound(NamedTuple):
    name: str  # one of LEVERS, or "nothing" where nothing was answered
    sentence: str


def bound_of(spent_s: Mapping[str, float]) -> Bound:
    """`spent_s`: seconds of answered requests by phase of a request; delivery and the gateway's own phases bound no run,
    and are part of the time that the share is of."""
    by_bound = {name: sum(spent_s.get(phase, 0.0) for phase in phases) for name, phases in PHASES.items()}
    if not any(by_bound.values()):
        return Bound("nothing", "No request was answered, so it is unknown what limits the run.")
    name = max(by_bound, key=lambda each: by_bound[each])
    share = by_bound[name] / sum(spent_s.values())
    evidence = _EVIDENCE[name].format(share=f"{share:.0%} of the answered requests' time")
    if name == "queue":
        evidence += f", mostly for a {QUEUES[max(QUEUES, key=lambda phase: spent_s.get(phase, 0.0))]} worker"
    return worded(name, evidence, LEVERS[name])


def bound_of_stack(spent_s: Mapping[str, float], window_s: float) -> Bound:
    """As the stack itself sees it: `spent_s` by those that ended in the last `window_s`. Their sum over it is how many
    it has had at once, in the mean (Little's law)."""
    at_once = sum(spent_s.values()) / max(window_s, 1e-9)
    if spent_s and at_once < LEAST_AT_ONCE:
        return worded("client", f"the stack waits for requests ({at_once:.2f} at a time in the mean)", MORE_LOAD)
    return bound_of(spent_s)


def aware_of_host(bound: Bound, num_cores: int, busy: float) -> Bound:
    """Add to advice for another worker that it does not help here, where the cores of this host are `busy`, 0 to 1."""
    if bound.name not in _MORE_WORKERS or busy < FULL_HOST:
        return bound
    caveat = f"Another worker needs another host: the {num_cores} cores of this one are {busy:.0%} busy."
    return Bound(bound.name, f"{bound.sentence} {caveat}")


def worded(name: str, evidence: str, lever: str) -> Bound:
    return Bound(name, f"Bound by {name}: {evidence}. Try this: {lever}.")
