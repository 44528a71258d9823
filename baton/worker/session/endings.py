"""Actions that end a leg of either role, and actions that leave it alone.

A leg that ends gives everything back. It is removed in `report_end` and nowhere else, with one Ended for each leg.
"""

from baton.engine.core.request import Refusal, RequestEnded
from baton.service.codec import key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg
from baton.worker.session.leg_machine import LegMachine
from baton.worker.wire import end_status, messages
from baton.worker.wire.end_status import Status
from kvtransfer.transfer.leases import LeaseEnding

IN_USE_RETRY_S = 0.05


def ignore(machine: LegMachine, leg: Leg, payload: object) -> None:
    """Do nothing: for a command that crossed the leg's Ended, or an output of a leg that is ending."""


def refuse_in_use(machine: LegMachine, leg: Leg, payload: object) -> None:
    """Refuse a command that would open a leg whose key is in use."""
    leg.outbox.reply(messages.refused(leg.key, "in_use", IN_USE_RETRY_S))


def refuse(machine: LegMachine, leg: Leg, refusal: Refusal) -> None:
    """Refuse a command that could not open its leg: there is no room, or the worker drains."""
    leg.outbox.reply(messages.refused(leg.key, refusal.reason, refusal.retry_after_s))


def end(machine: LegMachine, leg: Leg, status: Status | None) -> None:
    machine.give_back(leg, status)


def end_misplaced(machine: LegMachine, leg: Leg, message: object) -> None:
    machine.give_back(leg, end_status.misplaced(type(message).__name__))


def end_cancelled(machine: LegMachine, leg: Leg, message: pb.Cancel) -> None:
    machine.give_back(leg, end_status.OK if message.answered else end_status.CANCELLED)


def end_deadline(machine: LegMachine, leg: Leg, payload: None) -> None:
    machine.give_back(leg, end_status.DEADLINE)


def end_stream_lost(machine: LegMachine, leg: Leg, payload: None) -> None:
    machine.give_back(leg, end_status.STREAM_LOST)


def end_draining(machine: LegMachine, leg: Leg, payload: None) -> None:
    machine.give_back(leg, end_status.DRAINING)


def end_with_engine(machine: LegMachine, leg: Leg, ended: RequestEnded) -> None:
    """End with the status of the engine."""
    machine.give_back(leg, end_status.of_engine(ended))


def give_back_rest(machine: LegMachine, leg: Leg, ending: LeaseEnding) -> None:
    """Ask for what an ending leg could not give back before its lease was over."""
    machine.give_back(leg, None)


def settle(machine: LegMachine, leg: Leg, payload: object) -> None:
    """Remove the leg if nothing is out any more. The engine's status counts if the leg has none."""
    if leg.status is None and isinstance(payload, RequestEnded):
        leg.status = end_status.of_engine(payload)
    machine.settle(leg)


def report_end(machine: LegMachine, leg: Leg, payload: None) -> None:
    """Report the end of a leg to its gateway, if the session lives, and to metrics and spans."""
    leg.status = leg.status or end_status.CANCELLED
    if not leg.is_stream_lost:
        _send_end(leg)
    machine.on_ended(leg)
    machine.on_change()


def _send_end(leg: Leg) -> None:
    if leg.num_matched_tokens is None:
        report = leg.report if leg.times.start_at is not None else None
        leg.outbox.end(messages.ended(leg.key, leg.status, report, leg.times.kv_wait_s))
    else:
        not_here = pb.NotHere(key=key_to_proto(leg.key), num_matched_tokens=leg.num_matched_tokens)
        leg.outbox.reply(pb.Event(not_here=not_here))
