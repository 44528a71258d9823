"""The state machine of one request: it takes each event through the table of transitions.py until the request ends.

If no event comes in time, timeouts.py says what follows. The machine has no task of its own: legs, queues and timers
all speak through one mailbox, so cancelling the caller cancels everything, and `close()` closes every leg.
"""

import asyncio

from google.rpc import code_pb2

from baton.service.clock import now
from baton.service.errors import BatonError, Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.answer.answer import Diverged
from gateway.attempts.reattach import AttachReply
from gateway.link.mailbox import Tokens
from gateway.link.worker_leg import WorkerLeg
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence, RequestEvent, event_of
from gateway.orchestration.timeouts import TIMEOUTS, Timeout
from gateway.orchestration.transitions import TABLE
from gateway.request.request_state import RequestState

_NOT_ITS_PROMPT = "it answers a prompt that another worker reads"
_QUEUED = (RequestState.AWAITING_CREDIT, RequestState.AWAITING_PREFILL)


class ForbiddenTransition(Exception):
    """An action led to a state that its cell of the table does not list."""


class RequestMachine:
    """Drive one request. `state` is set here alone, and only to states that the table lists."""

    __slots__ = ("request", "state", "error", "is_superseded", "_entered_at", "_on_gone")

    def __init__(self, request: RequestContext):
        self.request = request
        self.state = RequestState.AWAITING_CREDIT
        self.error: BatonError | None = None  # the error that ended the request
        self.is_superseded = False  # the client continues the request in another stream
        self._entered_at = now()  # when the state was entered, or its wait began again
        self._on_gone: asyncio.Event | None = None  # made when somebody waits for it

    async def run(self) -> None:
        """Serve the request to its end; the caller sends the answer's last message. Raises BatonError."""
        self._begin()
        request = self.request
        while self.state is not RequestState.ENDED:
            timeout = TIMEOUTS[self.state]
            until = min(timeout.due(request, self._entered_at), request.deadline)
            await request.mailbox.wait(min(until, request.answer.due_at))
            entry = request.mailbox.pop()
            if now() >= request.deadline:
                self.happen(RequestEvent.DEADLINE)
                break
            if entry is None and now() >= until:
                self._expire(timeout, now() - until)
            self._receive_all(entry)
            if self.error is None:
                request.note_output()
                await self._write()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Cancel the request if it has not ended, and release everything that it holds. Idempotent."""
        if self.state is not RequestState.ENDED:
            self.happen(RequestEvent.CANCEL)
        self.request.close()
        # The traceback of the error refers back to this object: such a cycle would keep the whole request in memory
        # until the garbage collector runs.
        self.error = None

    def give_up(self, event: RequestEvent) -> None:
        """End the request by CANCEL or GRACE_OVER as soon as it is not busy writing to its client."""
        self.request.mailbox.post(None, event)

    def supersede(self) -> asyncio.Event:
        """End the request because its client continues it in another stream; return the event that it is gone.

        The client may not read this stream any more, so a write to it is interrupted: it could last until the
        deadline."""
        self.is_superseded = True
        self.give_up(RequestEvent.CANCEL)
        self.request.mailbox.timer.interrupt()
        self._on_gone = self._on_gone or asyncio.Event()
        return self._on_gone

    def note_gone(self) -> None:
        """Tell who superseded the request that its id is free."""
        if self._on_gone is not None:
            self._on_gone.set()

    def happen(self, kind: RequestEvent, payload: object = None) -> None:
        """Take one event through the table. Raises ForbiddenTransition."""
        cell, before = TABLE[self.state, kind], self.state
        event = Occurrence(kind, before, self._entered_at, payload)
        if cell.states[0] is not before:
            self._enter(cell.states[0])
        try:
            state = cell.action(self.request, event)
        except BatonError as error:
            state = self._fail(error)
        except Diverged as error:
            attempt = self.request.attempt
            giver = attempt.prefilling_leg if kind is RequestEvent.DONE else attempt.decode
            giver.link.note_failure(str(error))
            state = self._fail(Unavailable(str(error), reason="DIVERGED"))
        if state is not None:
            if state not in cell.states:
                raise ForbiddenTransition(f"{kind.value} while {before.value} has led to {state.value}")
            self._enter(state)
        if self.state is RequestState.ENDED:
            self.request.release()

    async def _write(self) -> None:
        """Send the client the messages that are due.

        A request leaves its queue before it writes, since a client that does not read would hold up the requests behind
        it; afterwards it asks for a worker again."""
        wait, answer = self.request.queue_wait, self.request.answer
        steps_out = wait.is_queued and answer.has_due
        if steps_out:
            wait.leave(served=False)
        self.request.mailbox.timer.arm()
        await answer.flush()
        if steps_out and self.state in _QUEUED:
            self.happen(RequestEvent.CAPACITY)

    def _enter(self, state: RequestState) -> None:
        self.state, self._entered_at = state, now()
        if state is not RequestState.ENDED:
            self.request.record.phase = state

    def _fail(self, error: BatonError) -> RequestState:
        self.error = error
        return RequestState.ENDED

    def _expire(self, timeout: Timeout, late_s: float) -> None:
        """Do what follows since no event came until the timeout's end, `late_s` ago."""
        event = timeout.expire(self.request, late_s)
        if event is not None:
            self.happen(event)
        elif timeout.repeats:
            self._entered_at = now()

    # ---- events ----

    def _begin(self) -> None:
        request = self.request
        if request.is_resumed:
            self.happen(RequestEvent.RESUMED)
        elif request.queues.credit.is_open_to(request.record.tenant):
            self.happen(RequestEvent.CAPACITY)
        else:
            request.queue_wait.join(request.queues.credit)

    def _receive_all(self, entry: tuple[WorkerLeg | None, object] | None) -> None:
        """Handle `entry` of the mailbox, unless it is None, and then every entry behind it."""
        request = self.request
        while entry is not None:
            self._receive(*entry)
            if request.answer.is_finished and self.state is RequestState.DECODING:
                self.happen(RequestEvent.FINISHED)  # before the Ended that may be the next entry
            entry = request.mailbox.pop()

    def _receive(self, leg: WorkerLeg | None, message: object) -> None:
        request, attempt = self.request, self.request.attempt
        if isinstance(message, RequestEvent):
            if message is RequestEvent.CAPACITY:
                request.note_capacity_taken()
            self.happen(message)
        elif request.reattach is not None and leg in request.reattach:
            self.happen(event_of(message, is_prefill=False), AttachReply(leg, message))
        elif leg is attempt.decode or leg is attempt.prefill:  # other legs belong to earlier attempts
            if isinstance(message, Tokens):
                leg.num_unread -= len(message.token_ids)
            if isinstance(message, pb.Done) and leg is not attempt.prefilling_leg:
                message = pb.Ended(code=code_pb2.INTERNAL, reason="DIVERGED", message=_NOT_ITS_PROMPT)
            self.happen(event_of(message, is_prefill=leg is attempt.prefill), message)
