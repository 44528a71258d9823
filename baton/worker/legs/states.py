"""The states of a leg on a worker and the events that may happen to it. What follows: session/table.py.

    decode    absent ─ admit ─► admitted ─ fetch ─► fetching ─ fetched ─► fetched ─ start ─► running ─► ending ─► absent
                                   │                   └─ start ─► starting ─ fetched ─────────►┘
                                   └─ prefill here ────────────────────────────────────────────►┘
    prefill   absent ─ prefill ─► prefilling ─ prefill done ─► held ─ lease over ─► ending ─► absent
    source    absent ─ offer ───────────────────────────────► held
    parking   running ─ unread ─► parked ─ read ─► running;  ─ stream lost ─► orphaned ─ attach ─► running

Everything else leads to `ending`: there the leg gives everything back, and with the last of it goes its one Ended.
"""

from enum import Enum


class LegState(Enum):
    ABSENT = "absent"
    ADMITTED = "admitted"  # a grant: credit, cached prefix pinned
    FETCHING = "fetching"  # KV is on its way here
    STARTING = "starting"  # the same, and the first tokens are known
    FETCHED = "fetched"  # every block is verified
    RUNNING = "running"  # the loop decodes it, or prefills and decodes it
    PARKED = "parked"  # its tokens are unread: the loop computes none until the gateway reads on
    ORPHANED = "orphaned"  # parked, and its stream is lost: a gateway may attach, for a while
    PREFILLING = "prefilling"  # for a taker
    HELD = "held"  # KV complete, leased
    ENDING = "ending"  # its status is known, something of it is still out


class LegEvent(Enum):
    # commands
    ADMIT = "admit"
    PREFILL = "prefill"  # for a taker
    PREFILL_HERE = "prefill here"
    FETCH = "fetch"
    START = "start"
    OFFER = "offer"
    ATTACH = "attach"  # on another stream, by another attempt's key
    RENEW = "renew lease"
    CANCEL = "cancel"
    # outputs of the engine, ends of fetches and leases, the session and the clock
    PROGRESS = "progress"  # of a prefill for a taker
    PREFILL_DONE = "prefill done"
    TOKENS = "tokens"  # of a step
    FETCHED = "fetched"
    FETCH_FAILED = "fetch failed"  # peer lost, ticket refused, digest wrong, time out, given up
    LEASE_OVER = "lease over"  # taken to the end, expired, or given up
    ENGINE_ENDED = "engine ended"  # finished, failed, its deadline, or given up
    STREAM_LOST = "stream lost"
    DEADLINE = "deadline"
    WINDOW_OVER = "window over"  # no gateway has attached
    UNREAD = "unread"  # the gateway does not read
    READ = "read"  # it does again
    GRACE_OVER = "grace over"  # the worker must go
    # raised by actions
    REFUSED = "refused"  # an opening command took nothing: the engine has no room, or the worker drains
    STOP = "stop"  # an action failed, or found nothing to do
    ALL_BACK = "all back"  # nothing of an ending leg is still out


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
