"""Actions that end a leg, of whatever role, and those that leave it alone.

A leg that ends gives everything back, and goes in `report_end` and nowhere else: one Ended for each leg.
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
    """Do nothing: a command that crossed the leg's Ended, an output of a leg that is ending."""


def refuse_in_use(lifecycle: Lifecycle, leg: Leg, subject: object) -> None:
    """Answer a command that would open a leg whose key is taken."""
    leg.outbox.reply(messages.refused(leg.key, "in_use", IN_USE_RETRY_S))


def refuse(lifecycle: Lifecycle, leg: Leg, refusal: Refusal) -> None:
    """Answer a command that could not open its leg: there is no room, or the worker drains."""
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
    """End with the status that the engine has given."""
    lifecycle.give_back(leg, end_status.of_engine(ended))


def give_back_rest(lifecycle: Lifecycle, leg: Leg, ending: str) -> None:
    """Ask for what an ending leg has kept until its lease was over."""
    lifecycle.give_back(leg, None)


def settle(lifecycle: Lifecycle, leg: Leg, subject: object) -> None:
    """Let the leg go if this was the last that was out. What the engine says counts where no status is known."""
    if leg.status is None and isinstance(subject, RequestEnded):
        leg.status = end_status.of_engine(subject)
    lifecycle.settle(leg)


def report_end(lifecycle: Lifecycle, leg: Leg, subject: None) -> None:
    """Tell the gateway, if its session lives, and all that count legs."""
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
