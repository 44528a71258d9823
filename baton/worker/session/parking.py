"""What happens to a sequence that nobody reads: it parks, and goes on when somebody does, here or on another stream.

    unread tokens ─► parked ─ read ─► running           the session lives: its gateway is slow, or stands still
    stream lost ───► orphaned ─ attach ─► running       the same gateway on a new session, or another one
                        └─ window over ─► ended

The loop computes nothing for it and it holds no block: whole units stay in the prefix cache, to be found again or to be
evicted. What it has put out is in its token record.
"""

import time
from dataclasses import replace

from baton.engine.core.request import Key, RequestEnded
from baton.service.codec import deadline_of, key_from_proto, key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.leg import Leg, Owed
from baton.worker.legs.states import KeyEvent
from baton.worker.session.keys import Keys
from baton.worker.wire import end_status, messages
from baton.worker.wire.outbox import Outbox


class Parking(Keys):
    """The actions that park a key and let it go on."""

    def _park(self, leg: Leg, subject) -> None:
        self._engine.park(leg.engine_key)
        self._on_change()

    def _resume(self, leg: Leg, subject) -> None:
        try:
            self._engine.resume(leg.engine_key, leg.request.deadline)
        except LookupError:  # it has ended just now: its last tokens and its RequestEnded are on their way
            pass
        self._on_change()

    def _orphan(self, leg: Leg, subject) -> None:
        if leg.record is None:  # its prompt is still being read
            self._end(leg, end_status.STREAM_LOST)
            return
        self._park(leg, None)
        self._set_timer(leg, time.monotonic() + self._resume_window_s, KeyEvent.WINDOW_OVER)

    def _keep_end(self, leg: Leg, ended: RequestEnded) -> None:
        """All its tokens are in the record: whoever attaches reads them there."""
        if ended.error:
            self._end_with_engine(leg, ended)

    def _attach(self, leg: Leg, subject: tuple[Outbox, pb.Attach]) -> None:
        outbox, attach = subject
        if not leg.is_stream_lost:  # as far as is known here
            leg.outbox.forget(leg.key)
            leg.outbox.end(messages.ended(leg.key, end_status.ATTACHED, None, 0.0))
        self.legs.rename(leg, Key(*key_from_proto(attach.key)))
        leg.outbox, leg.is_stream_lost = outbox, False
        deadline = deadline_of(attach.budget_ms)
        leg.request = replace(leg.request, deadline=deadline, traceparent=attach.traceparent)
        self._set_deadline(leg, deadline)
        outbox.reply(pb.Event(granted=pb.Granted(key=attach.key)))
        for run in leg.record.since(leg.key, attach.next_index):
            outbox.add_run(run)
        if Owed.ENGINE in leg.owed:
            self._resume(leg, None)
        else:
            self._end(leg, end_status.OK)

    def _not_here(self, leg: Leg, subject) -> None:
        leg.outbox.reply(pb.Event(not_here=pb.NotHere(key=key_to_proto(leg.key))))
