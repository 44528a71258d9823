"""The rows of the table of states that a decode worker adds: credit, adoption of KV, the token stream, parking."""

from baton.worker.legs.states import KeyEvent as Event
from baton.worker.legs.states import KeyState as State
from baton.worker.session.endings import end, ignore
from baton.worker.session.lifecycle import KeyTransition, Table
from decode_worker import adoption, credit, parking, token_stream

TRANSITIONS: Table = {
    (State.ABSENT, Event.ADMIT): KeyTransition(credit.admit, State.ADMITTED, (State.RUNNING, State.ENDING)),
    (State.ABSENT, Event.PREFILL_HERE): KeyTransition(credit.prefill_here, State.RUNNING),
    (State.ADMITTED, Event.PREFILL_HERE): KeyTransition(credit.prefill_here, State.RUNNING, (State.ENDING,)),
    (State.FETCHED, Event.PREFILL_HERE): KeyTransition(credit.prefill_here, State.RUNNING, (State.ENDING,)),
    (State.RUNNING, Event.PREFILL_DONE): KeyTransition(credit.report_done, State.RUNNING),
    (State.ADMITTED, Event.FETCH): KeyTransition(adoption.fetch, State.FETCHING),
    (State.FETCHING, Event.START): KeyTransition(adoption.keep_first_tokens, State.STARTING),
    (State.FETCHING, Event.FETCHED): KeyTransition(adoption.report_fetched, State.FETCHED),
    (State.FETCHING, Event.FETCH_FAILED): KeyTransition(end, State.ENDING),
    (State.STARTING, Event.FETCHED): KeyTransition(adoption.start_fetched, State.RUNNING, (State.ENDING,)),
    (State.STARTING, Event.FETCH_FAILED): KeyTransition(end, State.ENDING),
    (State.FETCHED, Event.START): KeyTransition(adoption.start, State.RUNNING, (State.ENDING,)),
    (State.RUNNING, Event.TOKENS): KeyTransition(token_stream.stream_tokens, State.RUNNING, (State.PARKED,)),
    (State.PARKED, Event.TOKENS): KeyTransition(token_stream.stream_last_tokens, State.PARKED),
    (State.ORPHANED, Event.TOKENS): KeyTransition(token_stream.record_tokens, State.ORPHANED),
    (State.RUNNING, Event.UNREAD): KeyTransition(parking.park, State.PARKED),
    (State.PARKED, Event.READ): KeyTransition(parking.resume, State.RUNNING),
    (State.RUNNING, Event.STREAM_LOST): KeyTransition(parking.orphan, State.ORPHANED, (State.ENDING,)),
    (State.PARKED, Event.STREAM_LOST): KeyTransition(parking.orphan, State.ORPHANED),
    (State.ORPHANED, Event.STREAM_LOST): KeyTransition(ignore, State.ORPHANED),
    (State.ABSENT, Event.ATTACH): KeyTransition(parking.find_and_attach, State.ABSENT),
    # Of a running or parked key, its own session is not known to be dead yet.
    (State.RUNNING, Event.ATTACH): KeyTransition(parking.attach, State.RUNNING),
    (State.PARKED, Event.ATTACH): KeyTransition(parking.attach, State.RUNNING),
    (State.ORPHANED, Event.ATTACH): KeyTransition(parking.attach, State.RUNNING, (State.ENDING,)),
    (State.ORPHANED, Event.ENGINE_ENDED): KeyTransition(parking.keep_end, State.ORPHANED, (State.ENDING,)),
    (State.ORPHANED, Event.WINDOW_OVER): KeyTransition(parking.end_forgotten, State.ENDING),
}
