"""Both ends of a pipeline: that of the first stage, which passes the parts of a step to the other stages in turn, and
that of another stage.

    first stage   [STEP, number of the part, its first row] and the part as of commands.py ──► stage 1
                  ◄── [DONE, number, ns that the stage has waited so far]; the part goes on to stage 2, and so on
    every stage   [BEAT], often: it runs
    first stage   [COPY, block, to block] ──► stages that have a pool of their own
                  [PUT, block, first layer] and its KV of some of the stage's layers ──► one of these
                  [ADAPTER, its number, bytes] and these ──► all stages (adapters.py)

The rows of a step are one tensor [tokens, hidden_size] that each stage changes in place. Either the ends share its
memory, or each end has its own and the rows follow the message. Each stage has room for the rows of a step: parts of
several steps may be under way, and they leave in the order in which they came.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine.core.batch import ForwardBatch
from baton.engine.parallel.collectives import RankLost
from baton.engine.parallel.commands import HEADER, packed, sizes_of, unpacked
from baton.engine.parallel.stream import Bytes, RankStream

STEP, DONE, BEAT, COPY, PUT, ADAPTER = range(6)
PREFIX = 3  # int64 numbers before every message
Part = tuple[int, int, Tensor]  # number, first row, the part as int64

logger = logging.getLogger(__name__)


class PipelineLeader:
    """Run the first stage's end. Call `send` and `receive` from one thread."""

    def __init__(self, streams: Sequence[RankStream], rows: Tensor):
        """Join `streams` to the other stages, in order; `rows`: [tokens of the largest step, for each stage,
        hidden_size]."""
        self.rows, self.degree = rows, 1 + len(streams)
        self._num_inside = 0  # parts sent and not yet received
        self._streams = list(streams)
        self._parts: list[deque[Part]] = [deque() for _ in streams]  # parts that a stage has not finished
        self._done: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waited_ns = [0] * self.degree
        self._is_lost = False
        for index in range(len(streams)):
            threading.Thread(target=self._read, args=(index,), name=f"stage {index + 1}", daemon=True).start()

    def send(self, number: int, first_row: int, batch: ForwardBatch) -> None:
        """Send a part of a step to the second stage. Its adapters are numbers, and its rows are in `rows` from
        `first_row` on."""
        self._give(0, (number, first_row, packed(batch)))
        self._num_inside += 1

    def send_adapter(self, key: int, data: Tensor) -> None:
        """Send all stages what HeldAdapters applies."""
        for stream in self._streams:
            stream.send(_bytes(torch.tensor((ADAPTER, key, len(data)))), *([_bytes(data)] if len(data) else []))

    def receive(self) -> None:
        """Wait until one more part has left the last stage. Raises RankLost."""
        begun = time.monotonic_ns()
        done = self._done.get()
        self._waited_ns[0] += time.monotonic_ns() - begun
        if done is None:
            raise RankLost("a rank is lost")
        self._num_inside -= 1

    def drain(self) -> None:
        """Wait until no part is in the pipeline. Raises RankLost."""
        while self._num_inside:
            self.receive()

    def copy_block(self, source: int, target: int) -> None:
        """Tell stages of other hosts to copy a block of their pools."""
        for stream in self._streams:
            if not stream.shares_memory:
                stream.send(_bytes(torch.tensor((COPY, source, target))))

    def beat_of(self, rank: int) -> int:
        """Return how many messages a stage has sent, counting parts of a long one."""
        return self._streams[rank - 1].num_received

    def waited_s(self, rank: int) -> float:
        """Return for how many seconds a stage has waited for parts of steps."""
        return self._waited_ns[rank] / 1e9

    def lose(self) -> None:
        """Make every wait of every stage end."""
        self._is_lost = True
        for stream in self._streams:
            stream.close()
        self._done.put(None)

    def _give(self, index: int, part: Part) -> None:
        if self._is_lost:
            raise RankLost("a rank is lost")
        number, first_row, payload = part
        self._parts[index].append(part)
        stream = self._streams[index]
        rows = () if stream.shares_memory else (_bytes(self._rows_of(part)),)
        stream.send(_bytes(torch.tensor((STEP, number, first_row))), _bytes(payload), *rows)

    def _rows_of(self, part: Part) -> Tensor:
        _, first_row, payload = part
        return self.rows[first_row : first_row + int(payload[1])]

    def _read(self, index: int) -> None:
        stream = self._streams[index]
        try:
            while True:
                message = stream.receive()
                kind, number, waited_ns = _numbers(message, PREFIX).tolist()
                if kind == BEAT:
                    continue
                self._waited_ns[index + 1] = waited_ns
                part = self._parts[index].popleft()
                if not stream.shares_memory:
                    _copy(message[8 * PREFIX :], self._rows_of(part))
                if index + 1 < len(self._streams):
                    self._give(index + 1, part)
                else:
                    self._done.put(number)
        except RankLost:
            pass
        except Exception:
            logger.exception("stage %d is lost: what it has sent could not be taken", index + 1)
        finally:  # otherwise `receive` would wait forever
            self.lose()


class PipelineFollower:
    """Run another stage's end. Call `receive` and `send` from one thread, `beat` from any."""

    def __init__(self, stream: RankStream, rows: Tensor):
        """Use `stream`, and `rows` like the first stage's, in the same memory if the stream shares it."""
        self._stream, self._rows = stream, rows
        self._waited_ns = self._number = 0

    def receive(self, on_message: Callable[[int, int, int, Tensor], None]) -> tuple[ForwardBatch, Tensor]:
        """Wait for a part of a step; return it with its rows from the stage before. `on_message` is called with the
        numbers and the bytes, uint8, of every other message before it. Raises RankLost."""
        begun = time.monotonic_ns()
        message = self._stream.receive()
        while (prefix := _numbers(message, PREFIX).tolist())[0] != STEP:
            kind, number, other = prefix
            on_message(kind, number, other, _octets(message[8 * PREFIX :]))
            message = self._stream.receive()
        self._waited_ns += time.monotonic_ns() - begun
        _, self._number, first_row, *header = _numbers(message, PREFIX + HEADER).tolist()
        begin, count = 8 * (PREFIX + HEADER), sum(sizes_of(header))
        part = unpacked(header, _numbers(message[begin:], count))
        rows = self._rows[first_row : first_row + len(part.token_ids)]
        if not self._stream.shares_memory:
            _copy(message[begin + 8 * count :], rows)
        return part, rows

    def send(self, rows: Tensor) -> None:
        """Send these rows, the ones that `receive` returned last, as this stage's result."""
        payload = () if self._stream.shares_memory else (_bytes(rows),)
        self._stream.send(_bytes(torch.tensor((DONE, self._number, self._waited_ns))), *payload)

    def beat(self) -> None:
        """Say that this process runs."""
        self._stream.send(_bytes(torch.tensor((BEAT, 0, 0))))


def put_message(block: int, first_layer: int, data: Tensor) -> tuple[Bytes, Bytes]:
    """Return the parts of a message with which a stage of another host writes what KVPool.layers_of_block returned."""
    return _bytes(torch.tensor((PUT, block, first_layer))), _bytes(data)


def rows_over(memory: memoryview, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Return rows of a step [tokens, hidden_size] over shared memory, writable."""
    return torch.frombuffer(memory, dtype=dtype).view(-1, hidden_size)


def _numbers(message: memoryview, count: int) -> Tensor:
    """Return the first int64 numbers of a message."""
    return torch.frombuffer(message, dtype=torch.int64, count=count) if count else torch.empty(0, dtype=torch.int64)


def _octets(message: memoryview) -> Tensor:
    return torch.frombuffer(message, dtype=torch.uint8) if len(message) else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def _copy(message: memoryview, rows: Tensor) -> None:
    rows.copy_(torch.frombuffer(message, dtype=rows.dtype).view(rows.shape))
