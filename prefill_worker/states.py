"""The transitions that the prefill role adds: a prompt that is read for a taker."""

from baton.worker.legs.states import LegEvent as Event
from baton.worker.legs.states import LegState as State
from baton.worker.session.leg_machine import LegTransition, Table
from baton.worker.session.offers import renew
from baton.worker.session.opening import compute_rest
from prefill_worker import prompts

TRANSITIONS: Table = {
    (State.ABSENT, Event.PREFILL): LegTransition(prompts.prefill, State.PREFILLING, (State.ENDING,)),
    # A prefix from other workers: what arrives counts as computed; the rest comes from the next source, or is computed.
    (State.PREFILLING, Event.FETCHED): LegTransition(compute_rest, State.PREFILLING, (State.ENDING,)),
    (State.PREFILLING, Event.FETCH_FAILED): LegTransition(prompts.pull_prefix, State.PREFILLING, (State.ENDING,)),
    (State.PREFILLING, Event.PROGRESS): LegTransition(prompts.advance, State.PREFILLING),
    (State.PREFILLING, Event.RENEW): LegTransition(renew, State.PREFILLING),
    (State.PREFILLING, Event.PREFILL_DONE): LegTransition(prompts.hold, State.HELD),
    (State.PREFILLING, Event.LEASE_OVER): LegTransition(prompts.end_lease_lost, State.ENDING),
}
