"""Bring a key of a worker into a state, and let events happen to it, as a gateway and the world do."""

import asyncio

from baton.engine.core.request import (
    FirstToken,
    Key,
    PrefillDone,
    Progress,
    TokenRun,
)
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import LegEvent, LegState
from baton.worker.wire.end_status import Status
from kvtransfer.transfer.fetcher import FetchReport
from tests.support.worker.doubles import LEASE_ID, Bench, make_spec

KEY, OTHER = Key("one", 1), Key("one", 2)  # of two attempts at the same request
REPORT = FetchReport(3, 12, 8, "shm", "exact", 0.1, 0.01, "because")
DONE = PrefillDone(KEY, (FirstToken(0, 7),), 0.1, 0.2, 0, 1)
FAILED = Status(14, "KV_TRANSFER_FAILED", "line broke")


# How a gateway and the world bring a key into each state.
PATHS = {
    LegState.ABSENT: (),
    LegState.ADMITTED: (LegEvent.ADMIT,),
    LegState.FETCHING: (LegEvent.ADMIT, LegEvent.FETCH),
    LegState.STARTING: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.START),
    LegState.FETCHED: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED),
    LegState.RUNNING: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED, LegEvent.START),
    LegState.PARKED: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED, LegEvent.START, LegEvent.UNREAD),
    LegState.ORPHANED: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.FETCHED, LegEvent.START, LegEvent.STREAM_LOST),
    LegState.PREFILLING: (LegEvent.PREFILL,),
    LegState.HELD: (LegEvent.PREFILL, LegEvent.PREFILL_DONE),
    LegState.ENDING: (LegEvent.ADMIT, LegEvent.FETCH, LegEvent.CANCEL),
}


def attach(key: Key = OTHER, **fields) -> pb.Attach:
    named = pb.Key(request_id=key.request_id, attempt=key.attempt)
    return pb.Attach(key=named, **{"next_index": [0], "budget_ms": 60_000, **fields})


def let(bench: Bench, event: LegEvent) -> None:
    """Makes the event happen the way it does."""
    key, commands = pb.Key(request_id=KEY.request_id, attempt=KEY.attempt), bench.commands
    taker = pb.Prefill(key=key, spec=make_spec())
    taker.taker.instance = b"taker"
    offer = pb.Offer(key=key, budget_ms=60_000)
    offer.spans.hashes.append(b"h" * 32)
    by_command = {
        LegEvent.ADMIT: {"admit": pb.Admit(key=key, spec=make_spec())},
        LegEvent.PREFILL: {"prefill": taker},
        LegEvent.PREFILL_HERE: {"prefill": pb.Prefill(key=key, spec=make_spec())},
        LegEvent.FETCH: {"fetch": pb.Fetch(key=key, handle=b"handle", ticket=b"ticket")},
        LegEvent.START: {"start": pb.Start(key=key, first_tokens=[pb.FirstToken(choice=0, token_id=7)])},
        LegEvent.OFFER: {"offer": offer},
        LegEvent.ATTACH: {"attach": attach()},
        LegEvent.RENEW: {"renew_lease": pb.RenewLease(key=key, lease_id=LEASE_ID)},
        LegEvent.CANCEL: {"cancel": pb.Cancel(key=key)},
    }
    leg = bench.leg(KEY)
    if event is LegEvent.ATTACH:
        bench.obey(bench.other, **by_command[event])
    elif event in by_command:
        bench.obey(**by_command[event])
    elif event is LegEvent.PROGRESS:
        commands.on_outputs([Progress(KEY, 64, 2)])
    elif event is LegEvent.PREFILL_DONE:
        commands.on_outputs([DONE])
    elif event is LegEvent.ENGINE_ENDED:
        bench.engine_ends(KEY)
    elif event is LegEvent.STREAM_LOST:
        commands.on_stream_lost(bench.outbox)
    elif event is LegEvent.GRACE_OVER:
        commands.on_grace_over()
    elif event is LegEvent.UNREAD:
        bench.outbox.has_room = False
        commands.on_outputs([TokenRun(KEY, 0, 1, (5,))])
        bench.outbox.has_room = True
    elif event is LegEvent.TOKENS:
        commands.on_outputs([TokenRun(KEY, 0, 1, (5,))])
    elif event is LegEvent.STOP and leg is not None:
        bench.lifecycle.stop(leg, FAILED)
    elif event is LegEvent.READ:
        commands.on_read(KEY)
    elif event is LegEvent.FETCHED and KEY in bench.intake.running:
        bench.intake.end(KEY, REPORT)
    elif event is LegEvent.FETCH_FAILED and KEY in bench.intake.running:
        bench.intake.end(KEY, FAILED)
    elif event is LegEvent.LEASE_OVER and KEY in bench.handoff.leased:
        bench.handoff.end(KEY)
    elif leg is not None:  # cannot happen by itself in this state; the table still says what would follow
        bench.lifecycle.happen(leg, event, None)


def run(check) -> None:
    bench = Bench()

    async def main():
        check(bench)

    asyncio.run(main())


def bring_to(bench: Bench, state: LegState) -> None:
    for step in PATHS[state]:
        let(bench, step)
