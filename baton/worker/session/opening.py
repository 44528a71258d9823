"""Open a leg of either role: check its key, budget and request, and compute the part of its prompt that no other worker
has given."""

from baton.engine.core.request import Refusal, Request
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg
from baton.worker.session.leg_machine import LegMachine
from baton.worker.wire import messages

DRAINING_RETRY_S = 1.0
MAX_ID_CHARS = 256


def open_request(machine: LegMachine, leg: Leg, spec: pb.RequestSpec) -> Request:
    """Return the checked request of a new leg; nothing is allocated yet. Raises Refusal while the worker drains,
    ValueError that names a bad field, TimeoutError for a budget that is used up."""
    if machine.is_draining:
        raise Refusal("draining", DRAINING_RETRY_S)
    check_key(leg)
    request = messages.request_of(leg.key, spec, machine.engine.spec.vocab_size)
    machine.set_deadline(leg, request.deadline)
    leg.request, leg.fingerprint, leg.traceparent = request, spec.fingerprint, spec.traceparent
    return request


def check_key(leg: Leg) -> None:
    """Raise ValueError for a request id that is empty or too long."""
    if not 1 <= len(leg.key.request_id) <= MAX_ID_CHARS:
        raise ValueError(f"key.request_id has {len(leg.key.request_id)} characters: 1 to {MAX_ID_CHARS}")


def compute_rest(machine: LegMachine, leg: Leg, payload: object) -> None:
    """Let the engine prefill what is not here yet."""
    try:
        machine.engine.admission.compute_rest(leg.key)
    except LookupError:  # the engine has ended it; its RequestEnded, with the reason, follows
        machine.stop(leg, None)
