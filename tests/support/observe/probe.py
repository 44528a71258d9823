"""Look into a worker through a session of its own, as a second gateway would: its blocks by holder."""

import queue
import secrets
import threading
import time

import grpc

from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.support.observe.loads import blocks_of, is_idle
from tests.support.pace import patience


class Probe:
    """Blocking; one session with one worker, held open until `close()`."""

    def __init__(self, target: str):
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(target)
        self._events = worker_pb2_grpc.WorkerStub(self._channel).Session(iter(self._commands.get, None))
        hello = pb.Hello(protocol_min=1, protocol_max=1, instance=secrets.token_bytes(16))
        self._commands.put(pb.Command(hello=hello))
        self.hello = next(event.hello for event in self._events if event.HasField("hello"))
        self._latest, self._num_loads = pb.Load(), 0
        self.faults: list[str] = []  # reports of ledgers that did not balance
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        self._commands.put(None)
        self._events.cancel()
        self._channel.close()

    def load(self, timeout_s: float = 10) -> pb.Load:
        """Return the next report that the worker makes from now on."""
        with self._arrived:
            # The first to arrive may have been under way already.
            wanted = self._num_loads + 2
            assert self._arrived.wait_for(lambda: self._num_loads >= wanted, patience(timeout_s)), (
                "the worker says nothing"
            )
            return self._latest

    def _read(self) -> None:
        try:
            for event in self._events:
                if event.HasField("load"):
                    self._watch(event.load)
                    with self._arrived:
                        self._latest, self._num_loads = event.load, self._num_loads + 1
                        self._arrived.notify_all()
        except grpc.RpcError:
            pass  # closed, or the worker is gone: then load() says so

    def _watch(self, load: pb.Load) -> None:
        if sum(load.blocks_by_holder) != load.num_blocks_total:
            self.faults.append(f"the ledger does not balance: {list(load.blocks_by_holder)} of {load.num_blocks_total}")

    @property
    def latest(self) -> pb.Load | None:
        """Return the last report; None before the first."""
        return self._latest if self._num_loads else None

    def blocks(self) -> dict[str, int]:
        return blocks_of(self.load())

    def wait_idle(self, timeout_s: float = 15) -> dict[str, int]:
        """Wait until the worker is idle; returns the blocks by holder."""
        deadline = time.monotonic() + patience(timeout_s)
        while True:
            load = self.load()
            if is_idle(load):
                return blocks_of(load)
            assert time.monotonic() < deadline, f"still held after {timeout_s} s: {blocks_of(load)}, {load}"
