"""The rows of the table of states that a prefill worker adds: a prompt that is read for a taker."""

from baton.worker.legs.states import KeyEvent as Event
from baton.worker.legs.states import KeyState as State
from baton.worker.session.lifecycle import KeyTransition, Table
from baton.worker.session.offers import renew
from baton.worker.session.opening import compute_rest
from prefill_worker import prompts

TRANSITIONS: Table = {
    (State.ABSENT, Event.PREFILL): KeyTransition(prompts.prefill, State.PREFILLING, (State.ENDING,)),
    # A prefix from other workers: what arrives counts as computed; what does not comes from the next source.
    (State.PREFILLING, Event.FETCHED): KeyTransition(compute_rest, State.PREFILLING, (State.ENDING,)),
    (State.PREFILLING, Event.FETCH_FAILED): KeyTransition(prompts.pull_prefix, State.PREFILLING, (State.ENDING,)),
    (State.PREFILLING, Event.PROGRESS): KeyTransition(prompts.advance, State.PREFILLING),
    (State.PREFILLING, Event.RENEW): KeyTransition(renew, State.PREFILLING),
    (State.PREFILLING, Event.PREFILL_DONE): KeyTransition(prompts.hold, State.HELD),
    (State.PREFILLING, Event.LEASE_OVER): KeyTransition(prompts.end_lease_lost, State.ENDING),
}
