"""The sessions that are open: whom to tell the load and the index, and who hangs up."""

from baton.engine.engine import Engine
from baton.v1 import worker_pb2 as pb
from baton.worker.wire.outbox import Outbox


class Sessions:
    """The outboxes of all sessions of one worker. Belongs to the event loop."""

    def __init__(self, engine: Engine):
        self.outboxes: set[Outbox] = set()
        self._of_instance: dict[bytes, Outbox] = {}
        self._engine = engine

    def open(self, instance: bytes, outbox: Outbox) -> Outbox | None:
        """Add the session of a gateway's link. Return the one before it, which must be dead: this one takes its
        place."""
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
        """Say on every session what has become of the worker."""
        event = pb.Event()
        event.hello.CopyFrom(hello)
        for outbox in self.outboxes:
            outbox.reply(event)

    def send_load(self, load: pb.Load) -> None:
        """Send it on every session."""
        for outbox in self.outboxes:
            outbox.set_load(load)

    def send_block_events(self) -> None:
        """Send what was sealed and evicted since the last call to the sessions that have subscribed."""
        sealed, evicted = self._engine.ledger.block_events()
        if sealed or evicted:
            for outbox in self.outboxes:
                outbox.add_block_events(sealed, evicted)

    def subscribe(self, outbox: Outbox, epoch: int) -> None:
        """Send a snapshot of the index on one session, and what changes from there on."""
        self.send_block_events()  # what the others must still hear is no news beside a snapshot
        outbox.subscribe(epoch, self._engine.ledger.snapshot())
