"""Fakes of what surrounds a worker's keys: they remember what they were given, and answer only when the test says
so."""

from types import SimpleNamespace

from baton.engine.core.request import Acceptance, Key, RequestEnded
from baton.v1 import worker_pb2 as pb
from baton.worker.kv.handoff import OnLeaseEnd
from baton.worker.session.leg_dispatcher import LegDispatcher
from baton.worker.session.leg_machine import LegMachine
from baton.worker.session.table import load_table
from baton.worker.wire.end_status import Status
from kvtransfer.errors import LeaseExpired
from kvtransfer.layout import BlockRef
from kvtransfer.transfer.leases import LeaseEnding

TABLE = load_table()
_CHAIN_ROOT = b"r" * 32
LEASE_ID = b"lease" * 3 + b"x"


class FakeEngine:
    """Every call is a line in `calls`; `answer[name]` is returned, or raised where it is an exception."""

    spec = SimpleNamespace(vocab_size=1000)

    def __init__(self):
        self.admission = self.ledger = self
        self.calls: list[tuple] = []
        blocks = Acceptance((BlockRef(0, 1),), 64)
        self.answer = {"admit": 0, "accept": blocks, "offer": blocks}

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            answer = self.answer.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


class FakeHandoff:
    """Leases; a cancelled one is over at once, as the source's are."""

    def __init__(self):
        self.leased: set[Key] = set()
        self.calls: list[tuple] = []
        self._on_lease_end: dict[Key, OnLeaseEnd] = {}

    def taker_of(self, message):
        return message

    def lease_prompt(self, leg, acceptance, taker, on_lease_end):
        self.leased.add(leg.key)
        self._on_lease_end[leg.key] = on_lease_end
        return {"lease_id": LEASE_ID, "handle": b"handle", "ticket": b"ticket"}

    def lease_chain(self, leg, acceptance, hashes, taker, on_lease_end):
        return self.lease_prompt(leg, acceptance, taker, on_lease_end)

    def lease_again(self, leg, lease_id, taker, on_lease_end):
        if lease_id != LEASE_ID:
            raise LeaseExpired("no such lease")
        return self.lease_prompt(leg, None, taker, on_lease_end)

    def cancel(self, leg):
        self.calls.append(("cancel", leg.key))
        self.end(leg.key, LeaseEnding.CANCELLED)

    def end(self, key, ending=LeaseEnding.RELEASED):
        if key in self.leased:
            self.leased.remove(key)
            self._on_lease_end[key](key, ending)

    def __getattr__(self, name):
        return lambda leg, *args: self.calls.append((name, leg.key))


class FakeIntake:
    """Fetches that end when the test says so."""

    def __init__(self):
        self.running: dict[Key, tuple] = {}
        self.stopped: list[Key] = []

    def begin(self, leg, handle, ticket, on_end):
        self.running[leg.key] = (leg, on_end)

    def begin_prefix(self, leg, on_end, on_verified):
        if leg.sources:
            leg.sources.pop(0)
            self.running[leg.key] = (leg, on_end)
        return leg.key in self.running

    def stop(self, leg):
        self.stopped.append(leg.key)

    def end(self, key, outcome):
        leg, on_end = self.running.pop(key)
        on_end(leg, outcome)


class FakeOutbox:
    """An outbox that keeps what the gateway would read."""

    def __init__(self):
        self.events: list[pb.Event] = []
        self.runs: list = []
        self.has_room = True
        self.forgotten: list[Key] = []

    def reply(self, event):
        self.events.append(event)

    end = reply

    def forget(self, key):
        self.forgotten.append(key)

    def add_run(self, run):
        self.runs.append(run)
        return self.has_room

    def kinds(self) -> list[str]:
        return [event.WhichOneof("kind") for event in self.events]

    def only(self, kind: str):
        found = [getattr(event, kind) for event in self.events if event.HasField(kind)]
        assert len(found) == 1, f"{len(found)} of {kind}: {self.kinds()}"
        return found[0]


class LegMachineHarness:
    """The keys of a worker among fakes, and commands to give them. `engine`: a real one instead of the fake."""

    def __init__(self, resume_window_s: float = 60.0, engine=None, table=TABLE):
        self.engine, self.handoff, self.intake = engine or FakeEngine(), FakeHandoff(), FakeIntake()
        self.ended: list = []
        self.machine = LegMachine(
            table, self.engine, self.handoff, self.intake, on_change=lambda: None, on_ended=self.ended.append,
            resume_window_s=resume_window_s,
        )  # fmt: skip
        self.dispatcher = LegDispatcher(self.machine)
        self.outbox = FakeOutbox()
        self.other = FakeOutbox()  # of another session

    def leg(self, key: Key):
        """Return a leg by the name that it began with."""
        return self.dispatcher.legs.of_engine(key)

    def dispatch(self, outbox=None, **command):
        self.dispatcher.dispatch(outbox or self.outbox, pb.Command(**command))

    def engine_ends(self, key: Key, error: str = "", message: str = ""):
        self.dispatcher.on_outputs([RequestEnded(key, error, message)])

    def come_home(self, key: Key):
        """Let everything that is still out for the key come back, as it would in time."""
        if key in self.intake.running:
            self.intake.end(key, Status(1, "CANCELLED"))
        self.handoff.end(key)
        leg = self.leg(key)
        if leg is not None and leg.owed:
            self.engine_ends(key, "cancelled")


def numbered_spec(num_tokens: int = 3, *, budget_ms: int = 60_000, max_tokens: int = 8, **fields) -> pb.RequestSpec:
    spec = pb.RequestSpec(
        token_ids=[1 + i % 900 for i in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        chain_parent=_CHAIN_ROOT,
        max_tokens=max_tokens,
        budget_ms=budget_ms,
        span_hashes=[bytes([i]) * 32 for i in range(num_tokens // 64)],
        **fields,
    )
    spec.sampling.top_p = 1
    spec.sampling.repetition_penalty = 1
    spec.sampling.n = 1
    return spec
