"""Name the states of a leg on a worker, and the events that may happen to it. session/table.py has the transitions.

    decode    absent ─ admit ─► admitted ─ fetch ─► fetching ─ fetched ─► fetched ─ start ─► running ─► ending ─► absent
                                   │                   └─ start ─► starting ─ fetched ─────────►┘
                                   └─ prefill here ────────────────────────────────────────────►┘
    prefill   absent ─ prefill ─► prefilling ─ prefill done ─► held ─ lease over ─► ending ─► absent
    source    absent ─ offer ───────────────────────────────► held
    parking   running ─ unread ─► parked ─ read ─► running;  ─ stream lost ─► orphaned ─ attach ─► running

Everything else leads to `ending`: there the leg gives everything back, and its one Ended is sent when that is done.
"""

from enum import Enum


class LegState(Enum):
    ABSENT = "absent"
    ADMITTED = "admitted"  # a grant: credit, cached prefix pinned
    FETCHING = "fetching"  # KV is being pulled
    STARTING = "starting"  # KV is being pulled, and the first tokens are known
    FETCHED = "fetched"  # every block is verified
    RUNNING = "running"  # the engine decodes it, or prefills and decodes it
    PARKED = "parked"  # too many tokens are unread: nothing is computed until the gateway reads them
    ORPHANED = "orphaned"  # parked, and its stream is lost: a gateway may attach for a while
    PREFILLING = "prefilling"  # for a taker
    HELD = "held"  # KV is complete and leased
    ENDING = "ending"  # its status is known, and some part still holds something of it


class LegEvent(Enum):
    # commands
    ADMIT = "admit"
    PREFILL = "prefill"  # for a taker
    PREFILL_HERE = "prefill here"
    FETCH = "fetch"
    START = "start"
    OFFER = "offer"
    ATTACH = "attach"  # another stream takes the leg over, with another attempt's key
    RENEW = "renew lease"
    CANCEL = "cancel"
    # outputs of the engine, ends of fetches and leases, the session and the clock
    PROGRESS = "progress"  # of a prefill for a taker
    PREFILL_DONE = "prefill done"
    TOKENS = "tokens"  # of a step
    FETCHED = "fetched"
    FETCH_FAILED = "fetch failed"  # peer lost, ticket refused, wrong digest, timeout, or cancelled
    LEASE_OVER = "lease over"  # taken to the end, expired, or cancelled
    ENGINE_ENDED = "engine ended"  # finished, failed, past its deadline, or cancelled
    STREAM_LOST = "stream lost"
    DEADLINE = "deadline"
    WINDOW_OVER = "window over"  # no gateway has attached
    UNREAD = "unread"  # the gateway does not read
    READ = "read"  # the gateway reads again
    GRACE_OVER = "grace over"  # the drain's grace period has ended
    # raised by actions
    REFUSED = "refused"  # an opening command allocated nothing: the engine has no room, or the worker drains
    STOP = "stop"  # an action failed, or found nothing to do
    ALL_BACK = "all back"  # an ending leg has got everything back


OPENING = (LegEvent.ADMIT, LegEvent.PREFILL, LegEvent.PREFILL_HERE, LegEvent.OFFER)
OPENED = (LegState.ADMITTED, LegState.PREFILLING, LegState.RUNNING, LegState.HELD)  # where an opening command leads
DECODING = (LegState.RUNNING, LegState.PARKED, LegState.ORPHANED)
LIVE = (
    LegState.ADMITTED,
    LegState.FETCHING,
    LegState.STARTING,
    LegState.FETCHED,
    *DECODING,
    LegState.PREFILLING,
    LegState.HELD,
)
