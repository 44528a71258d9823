"""Hold the open sessions: send load and index events to all, and close them."""

from baton.engine.engine import Engine
from baton.v1 import worker_pb2 as pb
from baton.worker.wire.outbox import Outbox


class Sessions:
    """The outboxes of all sessions of one worker. Used in the event loop only."""

    def __init__(self, engine: Engine):
        self.outboxes: set[Outbox] = set()
        self._of_instance: dict[bytes, Outbox] = {}
        self._engine = engine

    def open(self, instance: bytes, outbox: Outbox) -> Outbox | None:
        """Add a gateway's session. Return its session before, which must be dead, since this one replaces it."""
        last = self._of_instance.get(instance)
        self._of_instance[instance] = outbox
        self.outboxes.add(outbox)
        return last

    def close(self, instance: bytes, outbox: Outbox) -> None:
        """Remove a session that has ended."""
        self.outboxes.discard(outbox)
        if self._of_instance.get(instance) is outbox:
            del self._of_instance[instance]

    def hang_up(self) -> None:
        """End every session."""
        for outbox in list(self.outboxes):
            outbox.close()

    def send_hello(self, hello: pb.Hello) -> None:
        """Send the worker's new Hello to every session."""
        event = pb.Event()
        event.hello.CopyFrom(hello)
        for outbox in self.outboxes:
            outbox.reply(event)

    def send_load(self, load: pb.Load) -> None:
        """Send the load to every session."""
        for outbox in self.outboxes:
            outbox.set_load(load)

    def send_block_events(self) -> None:
        """Send the spans sealed and evicted since the last call to the subscribed sessions."""
        sealed, evicted = self._engine.ledger.block_events()
        if sealed or evicted:
            for outbox in self.outboxes:
                outbox.add_block_events(sealed, evicted)

    def subscribe(self, outbox: Outbox, epoch: int) -> None:
        """Send a snapshot of the index to one session, and later changes."""
        with self._engine.ledger.lock:  # what changed between the two calls could be in neither
            self.send_block_events()  # to the other sessions; the snapshot contains these changes already
            snapshot = self._engine.ledger.snapshot()
        outbox.subscribe(epoch, snapshot)
