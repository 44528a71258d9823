"""Compute the Timing of one request from its stamps. Phases are gaps between consecutive stamps, so they add up by
construction.

Stamps are on this process's monotonic clock. A duration that a worker measured on its own clock is cut to the gap that
it must fit in. Time between processes thus falls into the delivery phases and is never negative.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.service.observe.core_wait import PathDelay
from baton.service.observe.phases import DECODE
from baton.service.observe.phases import PHASES as TIMED
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2

# The parts of a request's whole time, in order; `decode` is all that comes after the second message.
PHASES = (*TIMED, DECODE)


@dataclass(slots=True)
class Stamps:
    """When each phase of a request ended, in time.monotonic() of this process; None if it did not."""

    received: float
    tokenized: float | None = None
    routed: float | None = None
    granted: float | None = None  # decode credit
    prefill_sent: float | None = None  # to the worker that accepted it, after waiting in this gateway's queue
    first_sent: float | None = None  # first token message handed to gRPC
    second_sent: float | None = None
    last_sent: float | None = None
    ended: float | None = None  # of an answer: last_sent; otherwise: when the request was given up


_NO_REPORT = worker_pb2.DecodeReport()  # never changed: each message is 0.5 KB of an open stream


@dataclass(slots=True)
class Measured:
    """Durations that workers reported, each on its own clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    after_last_ready_s: float = 0.0
    decode: worker_pb2.DecodeReport = field(default_factory=lambda: _NO_REPORT)
    # For gateway/request/bottlenecks.py: what the request waited for in its phases.
    prefill_core_wait: float = 0.0  # share of prefill in which its worker waited for a core
    decode_core_wait: float = 0.0  # the same for the decode worker
    unread_s: float = 0.0  # messages waited for the client
    path: PathDelay = PathDelay()  # the delay of messages between this event loop and the workers
    queued_s: dict[str, float] = field(default_factory=dict)  # in this gateway's queues, by bottleneck
    prefill_slot_s: float = 0.0  # on the worker that prefilled, for a slot in its batch
    prefill_block_s: float = 0.0  # likewise for blocks
    is_disaggregated: bool = False  # a prefill worker prefilled, not the decode worker


class PoolingStamps(NamedTuple):
    """When one prompt of a call began, was sent to the worker that accepted it, was launched there and was pooled, in
    time.monotonic() of this process."""

    begun: float
    sent: float
    launched: float
    pooled: float

    @classmethod
    def ended(cls, begun: float, sent: float, ended: float, done: worker_pb2.Done) -> "PoolingStamps":
        """Return the stamps of a prompt for which the worker's answer came at `ended`."""
        queue_s, prefill_s, _ = _cut(ended - sent, done.queue_s, done.prefill_s)
        return cls(begun, sent, sent + queue_s, sent + queue_s + prefill_s)


def note_pooling_phases(prompts: Sequence[PoolingStamps], stamps: Stamps, measured: Measured) -> None:
    """Record the phases of a call whose prompts were pooled in parallel and one after the other: `prefill` while a
    worker computes any of them, else `prefill_queue` while any waits for a worker."""
    stamps.prefill_sent = sent = min(each.sent for each in prompts)
    measured.prefill_s = _covered_s((each.launched, each.pooled) for each in prompts)
    under_way_s = _covered_s((max(sent, each.begun), each.pooled) for each in prompts)
    measured.queue_s = under_way_s - measured.prefill_s


def timing(stamps: Stamps, measured: Measured, num_output_tokens: int) -> pb.Timing:
    """Return the Timing message; `num_output_tokens` are the longest choice's. Phases that were not reached are 0."""
    first_s, second_s = _first_phases(stamps, measured), _second_phases(stamps, measured)
    result = pb.Timing()
    for phase, seconds in (first_s | second_s).items():
        setattr(result, f"{phase}_s", seconds)
    if stamps.first_sent is not None and first_s:
        result.ttft_s = stamps.first_sent - stamps.received
    result.transfer_s = max(0.0, measured.transfer_s)
    result.transfer_hidden_s = max(0.0, result.transfer_s - max(0.0, measured.after_last_ready_s))
    if stamps.last_sent is not None:
        result.total_s = stamps.last_sent - stamps.received
        if num_output_tokens > 1 and stamps.first_sent is not None:
            result.tpot_s = (stamps.last_sent - stamps.first_sent) / (num_output_tokens - 1)
    return result


def breakdown(stamps: Stamps, measured: Measured) -> dict[str, float]:
    """Return the seconds in each of PHASES that a request reached; they sum to `ended` - `received`, however it ended.
    A phase that was cut short counts up to the end."""
    ended, at, spent = stamps.ended or stamps.last_sent or stamps.received, stamps.received, {}
    for phase, until in (("tokenize", stamps.tokenized), ("route", stamps.routed), ("admit", stamps.granted)):
        spent[phase] = (ended if until is None else until) - at
        if until is None:
            return spent
        at = until
    if stamps.first_sent is None:
        spent["prefill_queue"] = (stamps.prefill_sent or ended) - at
        if stamps.prefill_sent is not None:
            spent["prefill"] = ended - stamps.prefill_sent
        return spent
    spent |= _first_phases(stamps, measured) | _second_phases(stamps, measured)
    spent["decode"] = ended - (stamps.second_sent or stamps.first_sent)
    return spent


def _first_phases(stamps: Stamps, measured: Measured) -> dict[str, float]:
    """Return the seconds by phase up to the first token; {} if none was sent."""
    if stamps.first_sent is None or stamps.tokenized is None or stamps.routed is None or stamps.granted is None:
        return {}
    gap = stamps.first_sent - stamps.granted
    waited_here = (stamps.prefill_sent or stamps.granted) - stamps.granted
    prefill_queue, prefill, first_delivery = _cut(gap, waited_here + measured.queue_s, measured.prefill_s)
    return {
        "tokenize": stamps.tokenized - stamps.received,
        "route": stamps.routed - stamps.tokenized,
        "admit": stamps.granted - stamps.routed,
        "prefill_queue": prefill_queue,
        "prefill": prefill,
        "first_delivery": first_delivery,
    }


def _second_phases(stamps: Stamps, measured: Measured) -> dict[str, float]:
    """Return the seconds by phase from the first token message to the second; {} if there was no second."""
    if stamps.first_sent is None or stamps.second_sent is None:
        return {}
    gap, decode = stamps.second_sent - stamps.first_sent, measured.decode
    kv_wait, decode_queue, first_step, second_delivery = _cut(
        gap, decode.kv_wait_s, decode.decode_queue_s, decode.first_step_s
    )
    return {
        "kv_wait": kv_wait,
        "decode_queue": decode_queue,
        "first_step": first_step,
        "second_delivery": second_delivery,
    }


def _cut(gap_s: float, *parts_s: float) -> list[float]:
    """Return the parts in seconds, cut so that they fit into the gap one after the other, and the rest of the gap."""
    cut = []
    for part_s in parts_s:
        cut.append(min(max(0.0, part_s), gap_s))  # in this order: NaN counts as 0
        gap_s -= cut[-1]
    return [*cut, gap_s]


def _covered_s(windows: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie within any of the windows (begin, end)."""
    covered_s, until = 0.0, float("-inf")
    for begin, end in sorted(windows):
        covered_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered_s
