"""One leg on a worker: it sends commands, and posts events to the request's mailbox."""

import itertools

from baton.service.clock import now
from baton.service.codec import key_to_proto
from baton.v1 import worker_pb2 as pb
from gateway.link.mailbox import EventSink, Lost, Overflow

_turn_ids = itertools.count()
Key = tuple[str, int]


class WorkerLeg:
    """The work of one request on one worker, under one key. `close()` cancels what still runs there."""

    __slots__ = (
        "link",
        "key",
        "worker_id",
        "mailbox",
        "tenant",
        "num_unread",
        "turn_id",
        "_num_prefill_tokens",
        "_slo_tpot_s",
        "_written_from",
        "_written_upto",
        "_open",
        "_asked_at",
        "_has_ended_silence",
    )

    def __init__(self, link, key: Key, mailbox: EventSink, tenant: str):
        """`link` is the WorkerLink of the worker."""
        self.link, self.key, self.mailbox, self.tenant = link, key, mailbox, tenant
        self.worker_id = link.worker_id
        self.turn_id = next(_turn_ids)  # by which MessageTurns spreads the messages of sequences
        self.num_unread = 0
        self._num_prefill_tokens = 0
        self._slo_tpot_s: float | None = None
        self._written_from = self._written_upto = 0  # range of the output indices that have arrived
        self._open = True
        self._asked_at: float | None = None  # when the first Admit or Prefill was sent (time.monotonic())
        self._has_ended_silence = False

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the leg's prompt that wait to be read on the worker."""
        return self._num_prefill_tokens

    @num_prefill_tokens.setter
    def num_prefill_tokens(self, num: int) -> None:
        self.link.add_prefill_tokens(self.tenant, num - self._num_prefill_tokens)
        self._num_prefill_tokens = num

    def set_slo(self, tpot_s: float | None) -> None:
        """Count the SLO's bound on the time per token (seconds, or None) among those of the worker while the leg is
        open."""
        if self._slo_tpot_s is not None:
            self.link.remove_slo(self._slo_tpot_s)
        self._slo_tpot_s = tpot_s
        if tpot_s is not None:
            self.link.add_slo(tpot_s)

    def send(self, **command) -> None:
        """Fill in the leg's key and send one command, as `send(cancel=pb.Cancel())`."""
        for message in command.values():
            message.key.CopyFrom(key_to_proto(self.key))
        if self._asked_at is None and ("admit" in command or "prefill" in command):
            self._asked_at = now()
            self.link.num_asked += 1
        self.link.session.send(pb.Command(**command))

    def post(self, event) -> None:
        """Post an event of this leg to the mailbox, and count what it says of the worker."""
        if isinstance(event, (pb.Done, pb.Fetched, pb.Refused)):
            self._note_work()
        if isinstance(event, pb.Refused):
            self.note_success()  # a refusal is an answer
        if isinstance(event, (Lost, pb.Ended, pb.Refused)):
            self._open = False  # nothing is left to cancel on the worker
            self._release()
        self.mailbox.post(self, event)

    def post_tokens(self, choice: int, first_index: int, token_ids: list[int], logprobs: list, reason: int) -> bool:
        """Add a row of a step to the mailbox without waking the reader. Return whether the reader should be woken soon:
        for the first row and the last."""
        is_first, upto = self._written_upto == 0, first_index + len(token_ids)
        self.num_unread += len(token_ids)
        if is_first:
            self._written_from = first_index
            self._note_work()
        self._written_upto = max(self._written_upto, upto)
        self.mailbox.add(self, choice, first_index, token_ids, logprobs, reason)
        if self.num_unread > self.link.max_unread_tokens and self._open:
            self.close()
            self.mailbox.post(self, Overflow())
        return is_first or reason != 0

    def finish(self) -> None:
        """Have the worker end this leg, since the answer is complete; Ended comes afterwards."""
        self.send(cancel=pb.Cancel(answered=True))

    def close(self, is_answered: bool = False) -> None:
        """Close the leg, so that its late events are dropped. Idempotent. `is_answered`: the answer is complete."""
        self.link.drop_leg(self)
        self._release()
        if self._open:
            self._open = False
            self.send(cancel=pb.Cancel(answered=is_answered))

    @property
    def num_written(self) -> int:
        """Tokens that have arrived for the leg's longest choice."""
        return self._written_upto - self._written_from

    def _note_work(self) -> None:
        if self._asked_at is not None:
            self._end_silence()
            self.link.note_worked(self._asked_at)

    def note_success(self) -> None:
        """Tell the breaker that the request which this leg sent was served."""
        if self._asked_at is not None:
            self.link.breaker.note_success(self._asked_at)

    def _release(self) -> None:
        self.num_prefill_tokens = 0
        self.set_slo(None)
        self._end_silence()

    def _end_silence(self) -> None:
        """Count the leg no more as one that shows no work; it may still run for minutes."""
        if self._asked_at is not None and not self._has_ended_silence:
            self._has_ended_silence = True
            self.link.num_asked -= 1
