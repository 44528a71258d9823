"""Run the state machine of legs: every event goes through a table of transitions, which alone sets a leg's state.

An action is a function of the machine, the leg, and the event's payload: the command's message, the engine's output, or
a status. It never sets the state. If it finds nothing to do it calls `stop`. An exception that it raises ends this leg
only, never the session or other legs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from baton.engine.core.request import Key, Refusal
from baton.engine.engine import Engine
from baton.service.fatal import exit_if_out_of_memory
from baton.service.logs import fields
from baton.worker.kv.handoff import Handoff
from baton.worker.kv.intake import Intake
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.legs import Legs
from baton.worker.legs.states import LegEvent, LegState
from baton.worker.wire import end_status
from baton.worker.wire.end_status import Status
from kvtransfer.errors import KVError
from kvtransfer.transfer.fetcher import FetchReport
from kvtransfer.transfer.leases import LeaseEnding

log = logging.getLogger(__name__)

Action = Callable[["LegMachine", Leg, Any], None]


class LegTransition(NamedTuple):
    """Move the leg to `state`, then run `action`. `others`: states that the action itself may lead to; if they include
    ENDING, the leg may already be absent when the action returns. If the action raises, the transition for STOP
    follows, or for REFUSED if it is a Refusal of an opening command."""

    action: Action
    state: LegState
    others: tuple[LegState, ...] = ()


Table = Mapping[tuple[LegState, LegEvent], LegTransition]


class LegMachine:
    """The state machine of all legs of one worker. Used in the event loop. Actions use its parts: engine, handoff,
    intake, legs."""

    def __init__(
        self,
        table: Table,
        engine: Engine,
        handoff: Handoff,
        intake: Intake,
        *,
        on_change: Callable[[], None],
        on_ended: Callable[[Leg], None],
        resume_window_s: float,
    ):
        """Begin without legs. `on_change()` is called when the load has changed, `on_ended(leg)` when a leg has ended,
        with all its times. `resume_window_s`: how long a sequence whose stream was lost waits for a gateway to
        attach."""
        self.engine = engine
        self.handoff = handoff
        self.intake = intake
        self.legs = Legs()
        self.is_draining = False
        self.resume_window_s = resume_window_s
        self.on_change = on_change
        self.on_ended = on_ended
        self._table = table

    def happen(self, leg: Leg, event: LegEvent, payload: object = None) -> None:
        """Dispatch one event of one leg: set its new state and run the action with the event's `payload`."""
        was_absent = leg.state is LegState.ABSENT
        transition = self._table[leg.state, event]
        self._move(leg, transition.state)
        try:
            transition.action(self, leg, payload)
        except Exception as error:
            if event is LegEvent.STOP:
                # Nothing more can be done: this leg may never give everything back, but only this one.
                log.exception("key not given back %s", fields(key=leg.key))
                exit_if_out_of_memory(error)
            elif isinstance(error, Refusal) and was_absent and not leg.owed:
                self.happen(leg, LegEvent.REFUSED, error)
            else:
                self._log(leg, transition, error)
                self.stop(leg, end_status.of_exception(error))

    def stop(self, leg: Leg, status: Status | None) -> None:
        """End a leg. The first status counts; with None the status comes with the engine's RequestEnded."""
        self.happen(leg, LegEvent.STOP, status)

    def give_back(self, leg: Leg, status: Status | None) -> None:
        """Ask for everything that an ending leg still has out. Its blocks are asked for when its lease is over, because
        until then a rank may confirm what is in them."""
        leg.status = leg.status or status
        if Owed.LEASE in leg.owed:
            self.handoff.cancel(leg)
        elif Owed.ENGINE in leg.owed:
            self.engine.cancel(leg.engine_key)  # before the fetch: its blocks are quarantined until it has settled
        if Owed.FETCH in leg.owed:
            self.intake.stop(leg)
        self.settle(leg)

    def settle(self, leg: Leg) -> None:
        """Remove an ending leg if nothing of it is out any more."""
        if not leg.owed:
            self.happen(leg, LegEvent.ALL_BACK)

    def set_deadline(self, leg: Leg, deadline: float) -> None:
        """Dispatch DEADLINE at `deadline`, on time.monotonic(). Raises TimeoutError if that is past."""
        if deadline <= time.monotonic():
            raise TimeoutError
        self.set_timer(leg, deadline, LegEvent.DEADLINE)

    def set_timer(self, leg: Leg, at: float, event: LegEvent) -> None:
        """Dispatch `event` at `at`, in place of the event that the leg's timer was set for."""
        if leg.timer is not None:
            leg.timer.cancel()
        leg.timer = asyncio.get_running_loop().call_at(at, self.happen, leg, event)

    def fetch_ended(self, leg: Leg, outcome: FetchReport | Status | None) -> None:
        """Note that no more bytes of the leg's fetch can land. None: the engine has ended the leg, and its RequestEnded
        says why."""
        leg.owed.discard(Owed.FETCH)
        leg.times.fetch_ended_at = time.monotonic()
        if isinstance(outcome, FetchReport):
            leg.fetch_report = outcome
            self.happen(leg, LegEvent.FETCHED, outcome)
        else:
            self.happen(leg, LegEvent.FETCH_FAILED, outcome)

    def lease_ended(self, key: Key, ending: LeaseEnding) -> None:
        """Note that a leg's lease is over."""
        leg = self.legs.get(key)
        if leg is not None and Owed.LEASE in leg.owed:
            leg.owed.discard(Owed.LEASE)
            self.happen(leg, LegEvent.LEASE_OVER, ending)

    def _move(self, leg: Leg, state: LegState) -> None:
        """Set the state. A leg is in `legs` while it is not absent."""
        before, leg.state = leg.state, state
        if before is LegState.ABSENT and state is not LegState.ABSENT:
            self.legs[leg.key] = leg
        elif before is not LegState.ABSENT and state is LegState.ABSENT:
            self.legs.forget(leg)
            if leg.timer is not None:
                leg.timer.cancel()

    @staticmethod
    def _log(leg: Leg, transition: LegTransition, error: Exception) -> None:
        """Log an error that no peer has caused. Does not return if the machine is out of memory."""
        if not isinstance(error, (ValueError, KVError, TimeoutError, Refusal)):
            log.exception("key failed %s", fields(key=leg.key, action=transition.action.__name__))
            exit_if_out_of_memory(error)
