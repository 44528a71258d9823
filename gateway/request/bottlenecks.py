"""Find what one request spent its time waiting for: each of its phases is divided among the words of
baton.service.observe.bottleneck without a rest.

Waiting for room comes first: in this gateway's queues and on workers, as each measured it. What is left of a phase on a
worker is divided into waiting for a core, by the share that the worker reports, and the phase's own work. Time between
processes is divided like the delays measured meanwhile: this event loop's, for want of a core or for its own work, and
the network's.
"""

from collections import defaultdict

from gateway.request.timing import Measured, Stamps, breakdown

# The phases in which a request waits in a queue of this gateway; in `decode` it has moved to another worker.
_QUEUED = {
    "decode queue": ("route", "admit", "decode"),
    "prefill queue": ("prefill_queue", "decode"),
    "kv pool": ("route", "admit", "prefill_queue", "decode"),
}


class _Attribution(defaultdict[str, float]):
    """Seconds by bottleneck, moved here from the seconds by phase, `spent_s`."""

    def __init__(self, spent_s: dict[str, float]):
        super().__init__(float)
        self.spent_s = defaultdict[str, float](float, spent_s)

    def move(self, bottleneck: str, phases: tuple[str, ...], most_s: float = float("inf")) -> None:
        """Move up to `most_s` seconds of these phases, in their order, to a bottleneck."""
        most_s = max(0.0, most_s)  # in this order: NaN counts as 0
        for phase in phases:
            taken_s = min(most_s, self.spent_s[phase])
            self[bottleneck] += taken_s
            self.spent_s[phase] -= taken_s
            most_s -= taken_s

    def move_work(self, bottleneck: str, phases: tuple[str, ...], core_wait: float) -> None:
        """Move all of these phases to a bottleneck, except `core_wait`, the share in which the worker waited for a
        core."""
        self.move("cores", phases, core_wait * sum(self.spent_s[phase] for phase in phases))
        self.move(bottleneck, phases)


def seconds_by_bottleneck(stamps: Stamps, measured: Measured) -> dict[str, float]:
    """Return seconds by bottleneck; their sum is that of the phases of `breakdown`."""
    found, waits = _Attribution(breakdown(stamps, measured)), measured.decode.waits
    for bottleneck, waited_s in measured.queued_s.items():
        found.move(bottleneck, _QUEUED[bottleneck], waited_s)
    _attribute_delivery(found, measured)
    found.move("kv pool", ("prefill_queue",), measured.prefill_block_s)
    if not measured.is_disaggregated:
        found.move("decode queue", ("prefill_queue",), measured.prefill_slot_s)
    found.move("kv pool", ("decode_queue", "decode"), waits.block_s)
    found.move("decode queue", ("decode_queue", "decode"), waits.place_s)
    found.move("prefill queue", ("prefill_queue",))
    found.move("decode queue", ("decode_queue",))
    found.move_work("prefill compute", ("prefill",), measured.prefill_core_wait)
    found.move_work("decode bandwidth", ("first_step", "decode"), measured.decode_core_wait)
    found.move("transfer", ("kv_wait",))
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _attribute_delivery(found: _Attribution, measured: Measured) -> None:
    """Divide the time between processes and in this one. Of `decode`, that is what exceeds the worker's own time."""
    decode, spent = measured.decode, found.spent_s
    own_s = max(0.0, decode.decode_s - decode.first_step_s)  # on the worker, after its first step
    late_s = max(0.0, spent["decode"] - own_s) if decode.decode_s else 0.0
    unread_s = min(measured.unread_s, spent["decode"] + spent["second_delivery"])
    found["client"] += unread_s
    between_s = spent["admit"] + spent["first_delivery"] + spent["second_delivery"] + late_s - unread_s
    if between_s < 0:  # the worker paused too while its tokens were not read
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
