"""Keep both sides of a dialogue in the same order.

taker                                   source
  │ ── Want{ticket, token_begin} ──────► │  checks the ticket first
  │ ◄────── Ready{range, digests} ────── │  whenever the (token, layer) watermark moves; bytes follow on tcp and grpc
  │  has room, places bytes, digests     │
  │ ── Ack{range} ─────────────────────► │  checks the lease and the generations again
  │ ◄──────────── Confirm{range} ─────── │
  │  verified(tokens whose layers are all confirmed)
  │ ── End{ok} ────────────────────────► │  may end the lease
Both sides send Renew every second: the taker's keeps the lease alive, the source's answer shows that it is alive.
"""

import asyncio
from collections.abc import Coroutine, Sequence

from baton.v1 import kv_pb2
from kvtransfer.errors import PeerLost, ProtocolError
from kvtransfer.layout import Range
from kvtransfer.naming import SPAN_TOKENS
from kvtransfer.transfer.leases import Watermark

RENEW_S = 1.0
LAST_WORDS_S = 1.0
# A range, announced by one Ready, has as many bytes as all ranges before it, within these bounds. So the taker has work
# early, works on one range while the source digests the next, and a prompt takes few frames (measured: 64 MiB in ranges
# of 8 MiB took 2 ms more, mostly threads waking each other).
FIRST_RANGE_BYTES = 1 << 20
MAX_RANGE_BYTES = 32 << 20
MAX_SENT_BYTES = 8 << 20  # where the source sends, the taker digests a range only when it has arrived
MAX_RANGE_TOKENS = 8192  # generations and digests of so many tokens fit in a frame, however small a token is


class Cursor:
    """Track the position of a dialogue: it has all layers of the tokens below `token`, and the layers below `layer` of
    the tokens up to `token_end`. Ranges follow each other without gap or overlap. A range has all layers of some
    tokens, or some layers of a stretch of tokens, which is then completed layer by layer. `layers`: those of the
    dialogue, numbered as in the whole model."""

    def __init__(self, token_begin: int, num_tokens: int, layers: range):
        """Begin at `token_begin`. Raises ProtocolError when that is not the end of a span or of the prompt."""
        if not 0 <= token_begin <= num_tokens or (token_begin % SPAN_TOKENS and token_begin != num_tokens):
            raise ProtocolError(f"token {token_begin} of {num_tokens}: a dialogue begins where a span does")
        self._begin = self.token = self.token_end = token_begin
        self.layer = layers.start
        self.num_tokens = num_tokens
        self.layers = layers

    @property
    def done(self) -> bool:
        return self.token == self.num_tokens

    def upcoming(self, mark: Watermark, token_bytes: int, max_bytes: int, max_stretch: int) -> Range | None:
        """Return the next range that the watermark allows, of about `max_bytes` at most, or None. `token_bytes`: the
        bytes of all layers of a token. A stretch of more than `max_stretch` tokens waits until all its layers are
        ready, since it cannot be cut once it is begun."""
        num_bytes = min(max_bytes, MAX_RANGE_BYTES, max(FIRST_RANGE_BYTES, (self.token - self._begin) * token_bytes))
        full_token = mark.upto_token if mark.upto_layer >= self.layers.stop else mark.full_token
        if self.token_end > self.token:  # a stretch of tokens that has its first layers
            ready = self.layers.stop if full_token >= self.token_end else mark.upto_layer
            return self._some_layers(self.token_end, ready, token_bytes, num_bytes)
        if full_token > self.token:
            step = max(1, min(MAX_RANGE_TOKENS, num_bytes // token_bytes) // SPAN_TOKENS) * SPAN_TOKENS
            return Range(self.token, min(full_token, self.token + step), self.layers.start, self.layers.stop)
        if mark.upto_token - self.token > max_stretch:
            return None
        return self._some_layers(mark.upto_token, mark.upto_layer, token_bytes, num_bytes)

    def _some_layers(self, token_end: int, ready: int, token_bytes: int, num_bytes: int) -> Range | None:
        ready = min(ready, self.layers.stop)
        if token_end <= self.token or ready <= self.layer:
            return None
        layer_bytes = max(1, token_bytes * (token_end - self.token) // len(self.layers))
        step = max(1, num_bytes // layer_bytes)
        return Range(self.token, token_end, self.layer, min(ready, self.layer + step))

    def take(self, moved: Range) -> None:
        """Advance by `moved`. Raises ProtocolError if it does not continue the range before it."""
        if self.token_end > self.token:
            follows = moved[:3] == (self.token, self.token_end, self.layer)
        else:
            end = moved.token_end
            aligned = self.token < end <= self.num_tokens and (end % SPAN_TOKENS == 0 or end == self.num_tokens)
            follows = aligned and (moved.token_begin, moved.layer_begin) == (self.token, self.layers.start)
        if not follows or not moved.layer_begin < moved.layer_end <= self.layers.stop:
            raise ProtocolError(f"{moved} does not follow token {self.token}..{self.token_end}, layer {self.layer} "
                                f"of {self.num_tokens} tokens, layers {self.layers}")  # fmt: skip
        if moved.layer_end == self.layers.stop:
            self.token = self.token_end = moved.token_end
            self.layer = self.layers.start
        else:
            self.token_end, self.layer = moved.token_end, moved.layer_end


def end_frame(status: str = "ok", message: str = "") -> kv_pb2.KVFrame:
    return kv_pb2.KVFrame(end=kv_pb2.End(status=status, message=message[:500]))


def renew_frame() -> kv_pb2.KVFrame:
    return kv_pb2.KVFrame(renew=kv_pb2.Renew())


async def converse(listening: Coroutine, *others: Coroutine) -> None:
    """Run the parts of one side until `listening` returns or any part fails; raise that failure. When this returns, all
    parts have ended, even on cancellation, because a thread of theirs may still be writing."""
    tasks = [asyncio.create_task(part) for part in (listening, *others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done() and any(isinstance(task.exception(), PeerLost) for task in tasks if task.done()):
            # A broken connection is noticed by sending first; the reason may still be there to be read.
            await asyncio.wait(tasks[:1], timeout=LAST_WORDS_S)
        next(task for task in tasks if task.done()).result()
    finally:
        await _end(tasks)


async def together(parts: Sequence[Coroutine]) -> None:
    """Run all parts to their ends. The first failure cancels the others, and is raised when they have ended."""
    if len(parts) == 1:
        return await parts[0]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        next(filter(_has_failed, tasks), tasks[0]).result()
    finally:
        await _end(tasks)


def _has_failed(task: asyncio.Task) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _end(tasks: list[asyncio.Task]) -> None:
    """Cancel all tasks, wait until they have ended, and empty the list. A failed task's traceback refers to the frame
    that holds `tasks`: that circle would keep all that was on its way until the garbage collector runs."""
    for task in tasks:
        task.cancel()
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancelled = True
    while tasks:
        if not (task := tasks.pop()).cancelled():
            task.exception()  # mark it as retrieved
    if cancelled:
        raise asyncio.CancelledError
