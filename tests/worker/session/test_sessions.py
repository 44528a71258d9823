"""What a session hears of the prefix cache is what the cache holds."""

import threading
from types import SimpleNamespace

from baton.engine.kv.ledger import Holder, Ledger
from baton.worker.session.sessions import Sessions

SPAN = b"s" * 32


class BusyLedger(Ledger):
    """The engine's thread waits for the lock, and acts as soon as it has it behind a call of `block_events`."""

    def __init__(self, act):
        super().__init__(1, 64)
        self._act = act

    def block_events(self) -> tuple[list[bytes], list[bytes]]:
        events = super().block_events()
        thread = threading.Thread(target=self._act_if_free)
        thread.start()
        thread.join()
        return events

    def _act_if_free(self) -> None:
        if self.lock.acquire(blocking=False):
            act, self._act = self._act, lambda ledger: None
            act(self)
            self.lock.release()


class Listener:
    """A session's outbox, which keeps the spans that it was told of."""

    def __init__(self):
        self.spans: set[bytes] | None = None

    def subscribe(self, epoch: int, snapshot: list[bytes]) -> None:
        self.spans = set(snapshot)

    def add_block_events(self, sealed: list[bytes], evicted: list[bytes]) -> None:
        if self.spans is not None:
            self.spans = (self.spans | set(sealed)) - set(evicted)


def seal(ledger: Ledger) -> None:
    blocks = ledger.allocate(1, Holder.RUNNING)
    ledger.seal((SPAN,), blocks)
    ledger.release(blocks, Holder.RUNNING)


def evict(ledger: Ledger) -> None:
    ledger.release(ledger.allocate(1, Holder.RUNNING), Holder.RUNNING)


def told(ledger: Ledger, act_later) -> set[bytes] | None:
    """Subscribe, and return what the session believes once the engine has done `act_later` too."""
    sessions, listener = Sessions(SimpleNamespace(ledger=ledger)), Listener()
    sessions.open(b"gateway", listener)
    sessions.subscribe(listener, 1)
    act_later(ledger)
    sessions.send_block_events()
    return listener.spans


def test_a_span_that_is_sealed_during_a_subscription_is_told_gone_when_it_goes():
    ledger = BusyLedger(seal)
    assert told(ledger, lambda ledger: evict(ledger) if ledger.snapshot() else None) == set()


def test_a_span_that_is_evicted_during_a_subscription_is_told_when_it_is_back():
    ledger = BusyLedger(evict)
    seal(ledger)
    assert told(ledger, lambda ledger: None if ledger.snapshot() else seal(ledger)) == {SPAN}
