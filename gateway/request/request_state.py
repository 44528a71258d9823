"""The states of a request in the gateway."""

from enum import Enum


class RequestState(Enum):
    """What a request waits for, or is in; the actions that lead from one to the next are in gateway/orchestration."""

    __hash__ = object.__hash__  # Enum's own is in Python, and each event looks into the table

    AWAITING_CREDIT = "awaiting credit"  # every decode worker is full
    ADMITTING = "admitting"  # Admit is sent
    AWAITING_PREFILL = "awaiting prefill"  # credit is granted, every prefill worker is full
    PREFILLING = "prefilling"  # Prefill is sent
    FETCHING = "fetching"  # accepted: the decode worker pulls while the prompt is read
    DECODING = "decoding"  # the first tokens are out
    ATTACHING = "attaching"  # Attach is sent, to a sequence whose stream was lost
    ENDING = "ending"  # every choice is finished, the decode worker's report is still to come
    ENDED = "ended"
