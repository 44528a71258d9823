"""The transitions that the decode role adds: credit, adoption of KV, the token stream, parking."""

from baton.worker.legs.states import LegEvent as Event
from baton.worker.legs.states import LegState as State
from baton.worker.session.endings import end, ignore
from baton.worker.session.leg_machine import LegTransition, Table
from decode_worker import adoption, credit, parking, token_stream

TRANSITIONS: Table = {
    (State.ABSENT, Event.ADMIT): LegTransition(credit.admit, State.ADMITTED, (State.RUNNING, State.ENDING)),
    (State.ABSENT, Event.PREFILL_HERE): LegTransition(credit.prefill_here, State.RUNNING),
    (State.ADMITTED, Event.PREFILL_HERE): LegTransition(credit.prefill_here, State.RUNNING, (State.ENDING,)),
    (State.FETCHED, Event.PREFILL_HERE): LegTransition(credit.prefill_here, State.RUNNING, (State.ENDING,)),
    (State.RUNNING, Event.PREFILL_DONE): LegTransition(credit.report_done, State.RUNNING),
    (State.ADMITTED, Event.FETCH): LegTransition(adoption.fetch, State.FETCHING),
    (State.FETCHING, Event.START): LegTransition(adoption.keep_first_tokens, State.STARTING),
    (State.FETCHING, Event.FETCHED): LegTransition(adoption.report_fetched, State.FETCHED),
    (State.FETCHING, Event.FETCH_FAILED): LegTransition(end, State.ENDING),
    (State.STARTING, Event.FETCHED): LegTransition(adoption.start_fetched, State.RUNNING, (State.ENDING,)),
    (State.STARTING, Event.FETCH_FAILED): LegTransition(end, State.ENDING),
    (State.FETCHED, Event.START): LegTransition(adoption.start, State.RUNNING, (State.ENDING,)),
    (State.RUNNING, Event.TOKENS): LegTransition(token_stream.stream_tokens, State.RUNNING, (State.PARKED,)),
    (State.PARKED, Event.TOKENS): LegTransition(token_stream.stream_last_tokens, State.PARKED),
    (State.ORPHANED, Event.TOKENS): LegTransition(token_stream.record_tokens, State.ORPHANED),
    (State.RUNNING, Event.UNREAD): LegTransition(parking.park, State.PARKED),
    (State.PARKED, Event.READ): LegTransition(parking.resume, State.RUNNING),
    (State.RUNNING, Event.STREAM_LOST): LegTransition(parking.orphan, State.ORPHANED, (State.ENDING,)),
    (State.PARKED, Event.STREAM_LOST): LegTransition(parking.orphan, State.ORPHANED),
    (State.ORPHANED, Event.STREAM_LOST): LegTransition(ignore, State.ORPHANED),
    (State.ABSENT, Event.ATTACH): LegTransition(parking.find_and_attach, State.ABSENT),
    # The session of a running or parked leg may have died without being noticed yet.
    (State.RUNNING, Event.ATTACH): LegTransition(parking.attach, State.RUNNING),
    (State.PARKED, Event.ATTACH): LegTransition(parking.attach, State.RUNNING),
    (State.ORPHANED, Event.ATTACH): LegTransition(parking.attach, State.RUNNING, (State.ENDING,)),
    (State.ORPHANED, Event.ENGINE_ENDED): LegTransition(parking.keep_end, State.ORPHANED, (State.ENDING,)),
    (State.ORPHANED, Event.WINDOW_OVER): LegTransition(parking.end_forgotten, State.ENDING),
}
