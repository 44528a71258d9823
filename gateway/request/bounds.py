"""What the time of one request was spent waiting for: each of its phases is divided among the words of
baton.service.observe.bound without a rest.

A phase in a worker is a share of waiting for a core, as that worker says, and what it is there for. What passes between
processes is divided as the delays are that were measured meanwhile: this event loop's, for want of a core or for its own
work, and the network's.
"""

from collections import defaultdict

from gateway.request.timing import Measured, Stamps, breakdown


def bound_seconds(stamps: Stamps, measured: Measured) -> dict[str, float]:
    """Return seconds by bound; they sum to the phases of `breakdown`."""
    spent = defaultdict[str, float](float, breakdown(stamps, measured))
    found = defaultdict[str, float](float)
    _divide_delivery(found, spent, measured)
    _divide_queues(found, spent, measured)
    _divide_work(found, "prefill compute", spent["prefill"], measured.prefill_core_wait)
    _divide_work(found, "decode bandwidth", spent["first_step"] + spent["decode"], measured.decode_core_wait)
    found["transfer"] += spent["kv_wait"]
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _divide_delivery(found: defaultdict[str, float], spent: defaultdict[str, float], measured: Measured) -> None:
    """Divide what passed between processes and in this one. Of `decode`, that is all beyond the worker's own time."""
    decode = measured.decode
    own_s = max(0.0, decode.decode_s - decode.first_step_s)  # of the worker, after its first step
    late_s = max(0.0, spent["decode"] - own_s) if decode.decode_s else 0.0
    unread_s = min(measured.unread_s, spent["decode"] + spent["second_delivery"])
    found["client"] += unread_s
    between_s = spent["first_delivery"] + spent["second_delivery"] + late_s - unread_s
    if between_s < 0:  # the worker paused too, until its tokens were read
        spent["decode"] += between_s
        between_s = 0.0
    spent["decode"] -= late_s
    core, busy, network = measured.path.shares()
    found["cores"] += core * between_s
    found["gateway"] += busy * between_s
    found["network"] += network * between_s
    before_s, own_core = spent["tokenize"] + spent["route"], core / (core + busy) if core + busy else 0.0
    found["cores"] += own_core * before_s
    found["gateway"] += (1 - own_core) * before_s


def _divide_queues(found: defaultdict[str, float], spent: defaultdict[str, float], measured: Measured) -> None:
    for bound, phases in (("prefill queue", ("prefill_queue",)), ("decode queue", ("admit", "decode_queue"))):
        found["kv pool" if bound in measured.full_pools else bound] += sum(spent[phase] for phase in phases)


def _divide_work(found: defaultdict[str, float], bound: str, seconds: float, core_wait: float) -> None:
    found["cores"] += core_wait * seconds
    found[bound] += (1 - core_wait) * seconds
