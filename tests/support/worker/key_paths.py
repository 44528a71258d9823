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
from tests.support.worker.fakes import LEASE_ID, LegMachineHarness, numbered_spec

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


_NAMED = pb.Key(request_id=KEY.request_id, attempt=KEY.attempt)
_COMMANDS = {
    LegEvent.ADMIT: {"admit": pb.Admit(key=_NAMED, spec=numbered_spec())},
    LegEvent.PREFILL: {"prefill": pb.Prefill(key=_NAMED, spec=numbered_spec(), taker={"instance": b"taker"})},
    LegEvent.PREFILL_HERE: {"prefill": pb.Prefill(key=_NAMED, spec=numbered_spec())},
    LegEvent.FETCH: {"fetch": pb.Fetch(key=_NAMED, handle=b"handle", ticket=b"ticket")},
    LegEvent.START: {"start": pb.Start(key=_NAMED, first_tokens=[pb.FirstToken(choice=0, token_id=7)])},
    LegEvent.OFFER: {"offer": pb.Offer(key=_NAMED, budget_ms=60_000, spans={"hashes": [b"h" * 32]})},
    LegEvent.ATTACH: {"attach": attach()},
    LegEvent.RENEW: {"renew_lease": pb.RenewLease(key=_NAMED, lease_id=LEASE_ID)},
    LegEvent.CANCEL: {"cancel": pb.Cancel(key=_NAMED)},
}


def make_happen(harness: LegMachineHarness, event: LegEvent) -> None:
    """Let the event happen in the way in which it does."""
    leg, dispatcher, intake = harness.leg(KEY), harness.dispatcher, harness.intake
    match event:
        case LegEvent.ATTACH:
            harness.dispatch(harness.other, **_COMMANDS[event])
        case _ if event in _COMMANDS:
            harness.dispatch(**_COMMANDS[event])
        case LegEvent.PROGRESS:
            dispatcher.on_outputs([Progress(KEY, 64, 2)])
        case LegEvent.PREFILL_DONE:
            dispatcher.on_outputs([DONE])
        case LegEvent.ENGINE_ENDED:
            harness.engine_ends(KEY)
        case LegEvent.STREAM_LOST:
            dispatcher.on_stream_lost(harness.outbox)
        case LegEvent.GRACE_OVER:
            dispatcher.on_grace_over()
        case LegEvent.UNREAD:
            harness.outbox.has_room = False
            dispatcher.on_outputs([TokenRun(KEY, 0, 1, (5,))])
            harness.outbox.has_room = True
        case LegEvent.TOKENS:
            dispatcher.on_outputs([TokenRun(KEY, 0, 1, (5,))])
        case LegEvent.STOP if leg is not None:
            harness.machine.stop(leg, FAILED)
        case LegEvent.READ:
            dispatcher.on_read(KEY)
        case LegEvent.FETCHED if KEY in intake.running:
            intake.end(KEY, REPORT)
        case LegEvent.FETCH_FAILED if KEY in intake.running:
            intake.end(KEY, FAILED)
        case LegEvent.LEASE_OVER if KEY in harness.handoff.leased:
            harness.handoff.end(KEY)
        case _ if leg is not None:  # cannot happen by itself in this state; the table still says what would follow
            harness.machine.happen(leg, event, None)


def run_with_harness(check) -> None:
    harness = LegMachineHarness()

    async def main():
        check(harness)

    asyncio.run(main())


def bring_to(harness: LegMachineHarness, state: LegState) -> None:
    for step in PATHS[state]:
        make_happen(harness, step)
