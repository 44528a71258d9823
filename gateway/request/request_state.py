"""The states of a request in the gateway."""

from enum import Enum


class RequestState(Enum):
    """What a request waits for or does; gateway/orchestration has the actions that lead from one state to the next."""

    __hash__ = object.__hash__  # Enum's own hash is slow Python, and every event looks into the table

    AWAITING_CREDIT = "awaiting credit"  # every decode worker is full
    ADMITTING = "admitting"  # Admit is sent
    AWAITING_PREFILL = "awaiting prefill"  # credit is granted, every prefill worker is full
    PREFILLING = "prefilling"  # Prefill is sent
    FETCHING = "fetching"  # accepted: the decode worker pulls while the prompt is read
    DECODING = "decoding"  # the first tokens are out
    ATTACHING = "attaching"  # Attach is sent, to a sequence whose stream was lost
    ENDING = "ending"  # every choice is finished, the decode worker's report is still to come
    ENDED = "ended"
