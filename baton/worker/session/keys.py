"""The keys of one worker: every event goes through the table of states.py, and each key ends in `_settle` and nowhere
else. How they open and go on: commands.py, how they park: parking.py."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from baton.engine.core.request import Refusal, RequestEnded
from baton.engine.engine import Engine
from baton.service.codec import key_to_proto
from baton.service.logs import fields
from baton.service.out_of_memory import leave_if_exhausted
from baton.v1 import worker_pb2 as pb
from baton.worker.kv.handoff import Handoff
from baton.worker.kv.intake import Intake
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.legs import Legs
from baton.worker.legs.states import TABLE, KeyEvent, KeyState
from baton.worker.wire import end_status, messages
from baton.worker.wire.end_status import Status
from kvtransfer.errors import KVError

IN_USE_RETRY_S = 0.05

log = logging.getLogger(__name__)


def _ending(status: Status) -> Callable[["Keys", Leg, object], None]:
    """The action that ends a key with one status, whatever the event brought."""

    def end(self: "Keys", leg: Leg, subject) -> None:
        self._end(leg, status)

    return end


class Keys:
    """Belongs to the event loop. The actions of the table are methods: those that end a key are here."""

    def __init__(
        self,
        engine: Engine,
        handoff: Handoff,
        intake: Intake,
        on_change: Callable[[], None],
        on_ended: Callable[[Leg], None],
        resume_window_s: float,
    ):
        """`on_change`: the load is different now. `on_ended`: a key has ended, with all its stamps. `resume_window_s`:
        how long a sequence whose stream was lost waits for somebody to attach."""
        self.legs = Legs()
        self._engine = engine
        self._handoff = handoff
        self._intake = intake
        self._on_change = on_change
        self._on_ended = on_ended
        self._resume_window_s = resume_window_s

    def happen(self, leg: Leg, event: KeyEvent, subject) -> None:
        """One event of one key. `subject` is the command's message or what the happening brought."""
        cell = TABLE[leg.state, event]
        was_absent = leg.state is KeyState.ABSENT
        leg.state = cell.state
        if was_absent and cell.state is not KeyState.ABSENT:
            self.legs[leg.key] = leg
        self._act(leg, getattr(self, f"_{cell.action}"), subject, was_absent)

    def _act(self, leg: Leg, action: Callable[[Leg, Any], None], subject, was_absent: bool = False) -> None:
        """What fails ends its key, never the stream, nor what comes for other keys behind it."""
        try:
            action(leg, subject)
        except Refusal as refusal:
            if was_absent and not leg.owed:
                self._forget(leg)
                leg.outbox.reply(messages.refused(leg.key, refusal.reason, refusal.retry_after_s))
            else:
                self._end(leg, end_status.of_exception(refusal))
        except Exception as error:
            if not isinstance(error, (ValueError, KVError, TimeoutError)):
                log.exception("key failed %s", fields(key=leg.key, action=action.__name__.strip("_")))
                leave_if_exhausted(error)
            self._end(leg, end_status.of_exception(error))

    # ---- shared by actions ----

    def _set_deadline(self, leg: Leg, deadline: float) -> None:
        if deadline <= time.monotonic():
            raise TimeoutError
        self._set_timer(leg, deadline, KeyEvent.DEADLINE)

    def _set_timer(self, leg: Leg, at: float, event: KeyEvent) -> None:
        """A leg waits for one thing at a time."""
        if leg.timer is not None:
            leg.timer.cancel()
        leg.timer = asyncio.get_running_loop().call_at(at, self.happen, leg, event, None)

    # ---- actions: ending ----

    def _ignore(self, leg: Leg, subject) -> None:
        """Late, or said before: a command that crossed the key's Ended, an output of a key that is ending."""

    def _refuse_in_use(self, leg: Leg, subject) -> None:
        leg.outbox.reply(messages.refused(leg.key, "in_use", IN_USE_RETRY_S))

    def _end_misplaced(self, leg: Leg, message) -> None:
        self._end(leg, end_status.misplaced(type(message).__name__))

    _end_cancelled = _ending(end_status.CANCELLED)
    _end_deadline = _ending(end_status.DEADLINE)
    _end_stream_lost = _ending(end_status.STREAM_LOST)
    _end_forgotten = _ending(end_status.NOBODY_CAME)
    _end_draining = _ending(end_status.DRAINING)
    _end_lease_lost = _ending(end_status.LEASE_EXPIRED)

    def _end_fetch_failed(self, leg: Leg, status: Status | None) -> None:
        self._end(leg, status)

    def _end_with_engine(self, leg: Leg, ended: RequestEnded) -> None:
        self._end(leg, end_status.of_engine(ended))

    def _end_lease(self, leg: Leg, ending: str) -> None:
        leg.status = end_status.LEASE_OVER[ending]
        self._engine.release_lease(leg.key)
        self._settle(leg, None)

    def _end(self, leg: Leg, status: Status | None) -> None:
        """Gives everything back. The first status counts; None leaves it to the engine's RequestEnded."""
        leg.state = KeyState.ENDING
        leg.status = leg.status or status
        if Owed.ENGINE in leg.owed:
            self._engine.cancel(leg.engine_key)  # before the fetch: its blocks are quarantined until it has settled
        if Owed.FETCH in leg.owed:
            self._intake.stop(leg)
        if Owed.LEASE in leg.owed:
            self._handoff.cancel(leg)
        self._settle(leg, None)

    def _settle(self, leg: Leg, subject) -> None:
        """The one place where a key ends: when the last of what it held is back."""
        if leg.status is None and isinstance(subject, RequestEnded):
            leg.status = end_status.of_engine(subject)
        if leg.owed or self.legs.get(leg.key) is not leg:
            return
        self._forget(leg)
        leg.status = leg.status or end_status.CANCELLED
        if not leg.is_stream_lost:
            self._report_ended(leg)
        self._on_ended(leg)
        self._on_change()

    def _report_ended(self, leg: Leg) -> None:
        if leg.num_matched_tokens is None:
            report = leg.report if leg.start_at is not None else None
            leg.outbox.end(messages.ended(leg.key, leg.status, report, leg.kv_wait_s))
        else:
            not_here = pb.NotHere(key=key_to_proto(leg.key), num_matched_tokens=leg.num_matched_tokens)
            leg.outbox.reply(pb.Event(not_here=not_here))

    def _forget(self, leg: Leg) -> None:
        self.legs.forget(leg)
        leg.state = KeyState.ABSENT
        if leg.timer is not None:
            leg.timer.cancel()
