"""Actions that end a leg of either role, and actions that leave it alone.

A leg that ends gives everything back. It is removed in `report_end` and nowhere else, with one Ended for each leg.
"""

from baton.engine.core.request import Refusal, RequestEnded
from baton.service.codec import key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg
from baton.worker.session.lifecycle import Lifecycle
from baton.worker.wire import end_status, messages
from baton.worker.wire.end_status import Status

IN_USE_RETRY_S = 0.05


def ignore(lifecycle: Lifecycle, leg: Leg, subject: object) -> None:
    """Do nothing: for a command that crossed the leg's Ended, or an output of a leg that is ending."""


def refuse_in_use(lifecycle: Lifecycle, leg: Leg, subject: object) -> None:
    """Refuse a command that would open a leg whose key is in use."""
    leg.outbox.reply(messages.refused(leg.key, "in_use", IN_USE_RETRY_S))


def refuse(lifecycle: Lifecycle, leg: Leg, refusal: Refusal) -> None:
    """Refuse a command that could not open its leg: there is no room, or the worker drains."""
    leg.outbox.reply(messages.refused(leg.key, refusal.reason, refusal.retry_after_s))


def end(lifecycle: Lifecycle, leg: Leg, status: Status | None) -> None:
    lifecycle.give_back(leg, status)


def end_misplaced(lifecycle: Lifecycle, leg: Leg, message: object) -> None:
    lifecycle.give_back(leg, end_status.misplaced(type(message).__name__))


def end_cancelled(lifecycle: Lifecycle, leg: Leg, message: pb.Cancel) -> None:
    lifecycle.give_back(leg, end_status.OK if message.answered else end_status.CANCELLED)


def end_deadline(lifecycle: Lifecycle, leg: Leg, subject: None) -> None:
    lifecycle.give_back(leg, end_status.DEADLINE)


def end_stream_lost(lifecycle: Lifecycle, leg: Leg, subject: None) -> None:
    lifecycle.give_back(leg, end_status.STREAM_LOST)


def end_draining(lifecycle: Lifecycle, leg: Leg, subject: None) -> None:
    lifecycle.give_back(leg, end_status.DRAINING)


def end_with_engine(lifecycle: Lifecycle, leg: Leg, ended: RequestEnded) -> None:
    """End with the status of the engine."""
    lifecycle.give_back(leg, end_status.of_engine(ended))


def give_back_rest(lifecycle: Lifecycle, leg: Leg, ending: str) -> None:
    """Ask for what an ending leg could not give back before its lease was over."""
    lifecycle.give_back(leg, None)


def settle(lifecycle: Lifecycle, leg: Leg, subject: object) -> None:
    """Remove the leg if nothing is out any more. The engine's status counts if the leg has none."""
    if leg.status is None and isinstance(subject, RequestEnded):
        leg.status = end_status.of_engine(subject)
    lifecycle.settle(leg)


def report_end(lifecycle: Lifecycle, leg: Leg, subject: None) -> None:
    """Report the end of a leg to its gateway, if the session lives, and to metrics and spans."""
    leg.status = leg.status or end_status.CANCELLED
    if not leg.is_stream_lost:
        _send_end(leg)
    lifecycle.on_ended(leg)
    lifecycle.on_change()


def _send_end(leg: Leg) -> None:
    if leg.num_matched_tokens is None:
        report = leg.report if leg.start_at is not None else None
        leg.outbox.end(messages.ended(leg.key, leg.status, report, leg.kv_wait_s))
    else:
        not_here = pb.NotHere(key=key_to_proto(leg.key), num_matched_tokens=leg.num_matched_tokens)
        leg.outbox.reply(pb.Event(not_here=not_here))
