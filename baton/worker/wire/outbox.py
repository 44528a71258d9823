"""Write a session's events: one task writes them, they are bounded, and merged while the gateway reads slowly.

replies            written without delay, in order (granted, accepted, done with its first tokens, fetched ...)
rows of tokens     merged per (key, choice); at most one message per 4 ms, split at 256 KiB
endings            after the rows of their key
load, block events only the latest load; block events are merged
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

from baton import failpoints
from baton.engine.core.request import FinishReason, Key, TokenLogprobs, TokenRun
from baton.service.clock import Offset
from baton.service.codec import key_to_proto
from baton.service.observe.telemetry import CLOCK
from baton.v1 import inference_pb2
from baton.v1 import worker_pb2 as pb
from baton.worker.wire.messages import logprobs_to_proto
from kvtransfer.naming import HASH_BYTES

MIN_GAP_S = 0.004  # between two messages of tokens
MAX_MESSAGE_BYTES = 256 << 10
MAX_UNREAD_TOKENS = 2048  # of one sequence, besides those that gRPC has buffered
MAX_REPLIES = 1024  # with more unwritten replies no more commands are read
_TOKEN_BYTES, _LOGPROB_BYTES, _ROW_BYTES, _KEY_BYTES = 5, 16, 24, 96
_HASHES_PER_MESSAGE = MAX_MESSAGE_BYTES // (HASH_BYTES + 2)


class Row:
    """Consecutive tokens of one choice, not yet written."""

    __slots__ = ("first_index", "token_ids", "logprobs", "finish_reason")

    def __init__(self, first_index: int):
        self.first_index = first_index
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None


class Outbox:
    """Collect and write the events of one session. Used in the event loop only."""

    def __init__(
        self, write: Callable[[pb.Event], Awaitable[None]], on_read: Callable[[Key], None] = lambda key: None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS, before_endings: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """Write by `write`, which sends one event and waits while the transport is full. `on_read(key)` is called when
        the tokens are written for which `add_run` returned False. `before_endings()` is called before each Ended is
        written, and may add block events."""
        self._write = write
        self._on_read = on_read
        self._before_endings = before_endings
        self._overfull: set[Key] = set()  # keys with too many tokens in `_rows`
        self._relieved: set[Key] = set()  # keys of `_overfull` whose rows are being written now
        self._max_unread_tokens = max_unread_tokens
        self._replies: list[pb.Event] = []
        self._rows: dict[tuple[Key, int], Row] = {}
        self._endings: list[pb.Event] = []
        self._load: pb.Load | None = None
        self.told_state = ""  # of the last load that was written
        self._beat, self._beat_at = pb.Beat(), 0.0
        self._index: IndexFeed | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_rows_at = 0.0
        self._is_closed = False
        self._is_writing = False

    # ---- in ----

    def reply(self, event: pb.Event) -> None:
        self._replies.append(event)
        if len(self._replies) > MAX_REPLIES:
            self._room.clear()
        self._wake.set()

    def end(self, event: pb.Event) -> None:
        """Write an Ended after all tokens that were added before it."""
        self._endings.append(event)
        self._wake.set()

    def add_run(self, run: TokenRun) -> bool:
        """Add tokens. Return False if the sequence now has too many unread tokens."""
        row = self._rows.get((run.key, run.choice))
        if row is None:
            row = self._rows[run.key, run.choice] = Row(run.first_index)
        row.token_ids += run.token_ids
        row.logprobs += run.logprobs
        row.finish_reason = run.finish_reason
        self._soon()
        if len(row.token_ids) <= self._max_unread_tokens:
            return True
        self._overfull.add(run.key)
        return False

    def forget(self, key: Key) -> None:
        """Drop the unwritten tokens of a key, because another session gets them."""
        self._rows = {named: row for named, row in self._rows.items() if named[0] != key}
        self._overfull.discard(key)
        self._relieved.discard(key)

    def set_load(self, load: pb.Load) -> None:
        self._load = load
        self._soon()

    def beat(self, beat: pb.Beat) -> None:
        """Answer a beat with the next load."""
        self._beat, self._beat_at = beat, time.monotonic()

    @property
    def clock(self) -> Offset | None:
        """Return by how much this process's clock is ahead of the gateway's, as the gateway has measured it; None if
        unknown."""
        beat = self._beat
        return Offset(beat.offset_ns / 1e9, beat.error_ns / 1e9) if beat.HasField("offset_ns") else None

    def subscribe(self, epoch: int, snapshot: list[bytes]) -> None:
        """Write index events from now on, the snapshot first."""
        self._index = IndexFeed(epoch, snapshot)
        self._soon()

    def add_block_events(self, sealed: list[bytes], evicted: list[bytes]) -> None:
        """Merge block events, if this session has subscribed."""
        if self._index is not None:
            self._index.add(sealed, evicted)
            self._soon()

    def close(self) -> None:
        """Stop writing; the writer returns."""
        self._is_closed = True
        self._replies, self._rows, self._endings, self._load, self._index = [], {}, [], None, None
        if self._timer is not None:
            self._timer.cancel()
        self._room.set()
        self._wake.set()

    async def room(self) -> None:
        """Wait while too many replies are unread. A gateway that does not read gets no more commands executed."""
        await self._room.wait()

    @property
    def num_rows(self) -> int:
        """Return the number of choices with unwritten tokens."""
        return len(self._rows)

    @property
    def num_unwritten(self) -> int:
        """Return the number of unwritten replies, rows and endings."""
        return len(self._replies) + self.num_rows + len(self._endings)

    @property
    def is_empty(self) -> bool:
        """Return whether everything is written."""
        return not (self._is_writing or self.num_unwritten)

    # ---- out ----

    async def run(self) -> None:
        """Write until `close`."""
        while not self._is_closed:
            await self._wake.wait()
            self._wake.clear()
            self._is_writing = True
            for event in self._take():
                await self._write(event)
            self._is_writing = False
            relieved, self._relieved = self._relieved - self._overfull, set()
            for key in relieved:
                self._on_read(key)

    def _soon(self) -> None:
        """Wake the writer as soon as rows may be written again."""
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_at(self._next_rows_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._wake.set()

    def _take(self) -> Iterator[pb.Event]:
        """Yield everything that may be written now. Replies that are added meanwhile are yielded before rows, since
        rows of their keys may exist already; everything else waits for the next call."""
        while self._replies:
            replies, self._replies = self._replies, []
            self._room.set()
            yield from replies
        now = time.monotonic()
        if self._endings or now >= self._next_rows_at:
            self._next_rows_at = now + MIN_GAP_S
            rows, self._rows = self._rows, {}
            self._relieved, self._overfull = self._overfull, set()
            endings, self._endings = self._endings, []
            load, self._load = self._load, None
            yield from step_outputs(rows)
            if endings:
                failpoints.hit("session.ended")
                self._before_endings()
            if self._index is not None:  # before an Ended, so that the next request finds this prompt in the index
                yield from self._index.take()
            yield from endings
            if load is not None:
                self.told_state = load.state
                yield self._stamped(load)
        elif self._rows or self._load or self._index:
            self._soon()

    def _stamped(self, load: pb.Load) -> pb.Event:
        """Return an event with the load and the times by which the gateway compares clocks. The load itself is shared
        by all sessions."""
        event, at = pb.Event(load=load), time.monotonic()
        event.load.wall_time_ns = CLOCK.wall_ns(at)
        if self._beat.sent_ns:
            event.load.beat_sent_ns, event.load.beat_held_ns = self._beat.sent_ns, round(1e9 * (at - self._beat_at))
        return event


def step_outputs(rows: dict[tuple[Key, int], Row]) -> Iterator[pb.Event]:
    """Yield the columns of all rows, in as many messages as their size needs."""
    columns = _Columns()
    for (key, choice), row in rows.items():
        per_token = _TOKEN_BYTES + (len(row.logprobs[0].top) + 1) * _LOGPROB_BYTES if row.logprobs else _TOKEN_BYTES
        begin, num_ids = 0, len(row.token_ids)
        while True:
            room = (MAX_MESSAGE_BYTES - columns.num_bytes - _ROW_BYTES - _KEY_BYTES) // per_token
            if room < min(16, num_ids - begin):
                yield columns.event()
                columns = _Columns()
                continue
            end = min(num_ids, begin + room)
            columns.add(key, choice, row, begin, end)
            columns.num_bytes += _ROW_BYTES + _KEY_BYTES + (end - begin) * per_token
            begin = end
            if begin == num_ids:
                break
    if columns.num_bytes:
        yield columns.event()


class _Columns:
    """A StepOutput that is being filled."""

    def __init__(self):
        self.message = pb.StepOutput()
        self.num_bytes = 0  # estimated from above
        self._index: dict[Key, int] = {}

    def add(self, key: Key, choice: int, row: Row, begin: int, end: int) -> None:
        message = self.message
        index = self._index.setdefault(key, len(self._index))
        if index == len(message.keys):
            message.keys.append(key_to_proto(key))
        message.key_index.append(index)
        message.choice.append(choice)
        message.first_index.append(row.first_index + begin)
        message.num_ids.append(end - begin)
        message.token_ids.extend(row.token_ids[begin:end])
        message.has_logprobs.append(bool(row.logprobs))
        if row.logprobs:
            message.logprobs.extend(map(logprobs_to_proto, row.logprobs[begin:end]))
        reason = row.finish_reason if end == len(row.token_ids) else None
        message.finish_reason.append(reason.value if reason else inference_pb2.FINISH_REASON_UNSPECIFIED)

    def event(self) -> pb.Event:
        return pb.Event(step_output=self.message)


class IndexFeed:
    """Number the index events of one subscription, from its snapshot on. Unwritten events are merged into their net
    effect."""

    def __init__(self, epoch: int, snapshot: list[bytes]):
        self._epoch = epoch
        self._seq = 0
        self._is_snapshot = True
        self._sealed: dict[bytes, None] = dict.fromkeys(snapshot)
        self._evicted: dict[bytes, None] = {}

    def add(self, sealed: list[bytes], evicted: list[bytes]) -> None:
        for span in sealed:
            if self._evicted.pop(span, False) is False:
                self._sealed[span] = None
        for span in evicted:
            # A snapshot replaces the whole index, so spans that it does not name need no eviction.
            if self._sealed.pop(span, False) is False and not self._is_snapshot:
                self._evicted[span] = None

    def take(self) -> Iterator[pb.Event]:
        sealed, evicted = list(self._sealed), list(self._evicted)
        self._sealed, self._evicted = {}, {}
        while sealed or evicted or self._is_snapshot:
            message = pb.BlockEvents(epoch=self._epoch, seq=self._seq, snapshot=self._is_snapshot)
            message.sealed.extend(sealed[:_HASHES_PER_MESSAGE])
            message.evicted.extend(evicted[: _HASHES_PER_MESSAGE - len(message.sealed)])
            del sealed[:_HASHES_PER_MESSAGE], evicted[: len(message.evicted)]
            self._seq += 1
            self._is_snapshot = False
            yield pb.Event(block_events=message)
