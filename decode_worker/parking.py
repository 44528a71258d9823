"""Actions of a sequence that no gateway reads: it parks, and resumes when a gateway reads, on this or another stream.

    unread tokens ─► parked ─ read ─► running           the session lives: its gateway is slow, or stuck
    stream lost ───► orphaned ─ attach ─► running       the same gateway on a new session, or another one
                        └─ window over ─► ended

A parked sequence computes nothing and holds no block: its whole units stay in the prefix cache, where they may be found
again or evicted. Its output so far is in its token record.
"""

import time
from dataclasses import replace

from baton.engine.core.request import Key, RequestEnded
from baton.service.codec import deadline_of, key_from_proto, key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.legs import Legs
from baton.worker.legs.states import DECODING, LegEvent
from baton.worker.session.leg_machine import LegMachine
from baton.worker.wire import end_status, messages
from baton.worker.wire.outbox import Outbox


def park(machine: LegMachine, leg: Leg, payload: None) -> None:
    machine.engine.admission.park(leg.engine_key)
    machine.on_change()


def resume(machine: LegMachine, leg: Leg, payload: None) -> None:
    try:
        machine.engine.admission.resume(leg.engine_key, leg.request.deadline)
    except LookupError:  # it has just ended; its last tokens and its RequestEnded follow
        pass
    machine.on_change()


def orphan(machine: LegMachine, leg: Leg, payload: None) -> None:
    """Park a leg whose stream is lost for the resume window; end it if its prompt is still being read."""
    if leg.record is None:
        machine.stop(leg, end_status.STREAM_LOST)
        return
    park(machine, leg, None)
    machine.set_timer(leg, time.monotonic() + machine.resume_window_s, LegEvent.WINDOW_OVER)


def keep_end(machine: LegMachine, leg: Leg, ended: RequestEnded) -> None:
    """Keep a leg that has finished, whose tokens are in its record, for a gateway that attaches."""
    if ended.error:
        machine.stop(leg, end_status.of_engine(ended))


def attach(machine: LegMachine, leg: Leg, payload: tuple[Outbox, pb.Attach]) -> None:
    """Continue with another key on another stream, after the tokens that the gateway has."""
    outbox, message = payload
    if not leg.is_stream_lost:  # the loss of the old stream has not been noticed yet
        leg.outbox.forget(leg.key)
        leg.outbox.end(messages.ended(leg.key, end_status.ATTACHED, None, 0.0))
    machine.legs.rename(leg, Key(*key_from_proto(message.key)))
    leg.outbox, leg.is_stream_lost = outbox, False
    deadline = deadline_of(message.budget_ms)
    leg.request, leg.traceparent = replace(leg.request, deadline=deadline), message.traceparent
    machine.set_deadline(leg, deadline)
    num_tokens = leg.record.num_tokens(len(message.next_index))
    outbox.reply(pb.Event(granted=pb.Granted(key=message.key, num_tokens=num_tokens)))
    for run in leg.record.since(leg.key, message.next_index):
        outbox.add_run(run)
    if Owed.ENGINE in leg.owed:
        resume(machine, leg, None)
    else:
        machine.stop(leg, end_status.OK)


def find_and_attach(machine: LegMachine, leg: Leg, payload: tuple[Outbox, pb.Attach]) -> None:
    """Dispatch an Attach to the leg that it is meant for, or answer that its sequence is not on this worker."""
    _, message = payload
    found = None if machine.is_draining else _attachable(machine.legs, message)
    if found is not None:
        machine.happen(found, LegEvent.ATTACH, payload)
    else:
        leg.outbox.reply(pb.Event(not_here=pb.NotHere(key=key_to_proto(leg.key))))


def _attachable(legs: Legs, message: pb.Attach) -> Leg | None:
    """Return the leg of the same request that has the most tokens, among those that have all tokens from where the
    answer continues."""
    found = [
        leg
        for leg in legs.values()
        if leg.key.request_id == message.key.request_id
        and message.previous_attempt in (0, leg.key.attempt)
        and leg.state in DECODING
        and leg.fingerprint == message.fingerprint
        and len(message.next_index) == leg.request.sampling.n
        and leg.record is not None
        and leg.record.reaches(message.next_index)
    ]
    return max(found, key=lambda leg: leg.num_output_tokens, default=None)


def end_forgotten(machine: LegMachine, leg: Leg, payload: None) -> None:
    """End a sequence to which no gateway has attached in time."""
    machine.give_back(leg, end_status.NOBODY_CAME)
