"""Actions that open an answer: grant credit for it, or read its prompt here."""

import time

from baton import failpoints
from baton.engine.core.request import PrefillDone
from baton.service.codec import key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.states import LegEvent
from baton.worker.legs.token_record import TokenRecord
from baton.worker.session.leg_machine import LegMachine
from baton.worker.session.opening import compute_rest, open_request
from baton.worker.wire import messages


def admit(machine: LegMachine, leg: Leg, message: pb.Admit) -> None:
    """Promise the blocks of a request, pin the cached part of its prompt, and answer Granted. Read the prompt here if
    the command asks for that."""
    request = open_request(machine, leg, message.spec)
    leg.num_cached_tokens = machine.engine.admission.admit(request)
    leg.owed.add(Owed.ENGINE)
    granted = pb.Granted(key=key_to_proto(leg.key), num_cached_tokens=leg.num_cached_tokens)
    leg.outbox.reply(pb.Event(granted=granted))
    if message.prefill:
        machine.happen(leg, LegEvent.PREFILL_HERE, pb.Prefill())
    machine.on_change()


def prefill_here(machine: LegMachine, leg: Leg, message: pb.Prefill) -> None:
    """Read the prompt here, or the part of it that is not cached. If the prompt is not to be answered there was no
    Admit, so Granted confirms it."""
    leg.times.prefill_at = time.monotonic()
    if leg.request is not None:
        compute_rest(machine, leg, None)
    else:
        machine.engine.admission.submit(open_request(machine, leg, message.spec))
        leg.owed.add(Owed.ENGINE)
        if leg.request.pooling is not None:
            leg.outbox.reply(pb.Event(granted=pb.Granted(key=key_to_proto(leg.key))))
    machine.on_change()


def report_done(machine: LegMachine, leg: Leg, done: PrefillDone) -> None:
    """Report the first tokens of a prompt that was read here; decoding follows. For a prompt that is not answered,
    report its vector; its end follows."""
    leg.prefill_done = done
    if leg.request.pooling is None:
        leg.times.start_at = leg.times.start_at or time.monotonic()
        leg.num_output_tokens += len(done.first_tokens)
        leg.record = TokenRecord(leg.request, done.first_tokens)
    failpoints.hit("prefill.done")
    leg.outbox.reply(messages.done(leg.key, done))
