"""Stamps of one request -> Timing. Phases are gaps between consecutive stamps, so they add up by construction.

Stamps are this process's monotonic clock. What a worker measured on its own clock is cut to the gap that it must fit
in, so that what passes between processes falls into the delivery phases and is never negative.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.service.observe.core_wait import PathDelay
from baton.service.observe.phases import DECODE
from baton.service.observe.phases import PHASES as TIMED
from baton.v1 import inference_pb2 as pb
from baton.v1 import worker_pb2

# What a request's whole time is divided into, in order; `decode` is all that comes after its second message.
PHASES = (*TIMED, DECODE)


@dataclass(slots=True)
class Stamps:
    """The end of each phase of a request: time.monotonic() of this process, None if it was not reached."""

    received: float
    tokenized: float | None = None
    routed: float | None = None
    granted: float | None = None  # decode credit
    prefill_sent: float | None = None  # to the worker that accepted it, after waiting here for its queue
    first_sent: float | None = None  # first token message handed to gRPC
    second_sent: float | None = None
    last_sent: float | None = None
    ended: float | None = None  # an answer: last_sent; anything else: when it was given up


_NO_REPORT = worker_pb2.DecodeReport()  # never changed: each message is 0.5 KB of an open stream


@dataclass(slots=True)
class Measured:
    """Durations that workers reported, each on its own clock."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    after_last_ready_s: float = 0.0
    decode: worker_pb2.DecodeReport = field(default_factory=lambda: _NO_REPORT)
    # What the phases were spent waiting for (gateway/request/bottlenecks.py).
    prefill_core_wait: float = 0.0  # share of the time of the worker that prefilled in which it waited for a core
    decode_core_wait: float = 0.0  # likewise of the decode worker
    unread_s: float = 0.0  # messages waited for the client
    path: PathDelay = PathDelay()  # how late messages are between this event loop and the workers
    in_line_s: dict[str, float] = field(default_factory=dict)  # in this gateway's lines, by bottleneck
    prefill_place_s: float = 0.0  # on the worker that prefilled, for a place in its batch
    prefill_block_s: float = 0.0  # and for blocks
    is_disaggregated: bool = False  # that was a prefill worker, not the decode worker


class PoolingStamps(NamedTuple):
    """When one prompt of a call was begun, sent to the worker that accepted it, launched there and pooled:
    time.monotonic() of this process."""

    begun: float
    sent: float
    launched: float
    pooled: float

    @classmethod
    def ended(cls, begun: float, sent: float, ended: float, done: worker_pb2.Done) -> "PoolingStamps":
        """Return those of a prompt whose worker's answer came at `ended`."""
        queue_s, prefill_s, _ = _cut(ended - sent, done.queue_s, done.prefill_s)
        return cls(begun, sent, sent + queue_s, sent + queue_s + prefill_s)


def note_pooling_phases(prompts: Sequence[PoolingStamps], stamps: Stamps, measured: Measured) -> None:
    """Record the phases of a call whose prompts were pooled beside and behind each other: it is in `prefill` while a
    worker computes any of them, and else in `prefill_queue` while any waits for a worker."""
    stamps.prefill_sent = sent = min(each.sent for each in prompts)
    measured.prefill_s = _covered_s((each.launched, each.pooled) for each in prompts)
    under_way_s = _covered_s((max(sent, each.begun), each.pooled) for each in prompts)
    measured.queue_s = under_way_s - measured.prefill_s


def timing(stamps: Stamps, measured: Measured, num_output_tokens: int) -> pb.Timing:
    """Return the Timing message. `num_output_tokens`: of the longest choice. Phases that were not reached are 0."""
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
    """Return seconds in each of PHASES that a request reached, whatever its end; they sum to `ended` - `received`. A
    phase that was cut short counts up to the end."""
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
    """Return seconds by phase up to the first token; nothing where none was sent."""
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
    """Return seconds by phase from the first token message to the second; nothing where that was not sent."""
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
    """Return the parts (seconds), cut so that they fit into the gap one after the other, and what is left of it."""
    cut = []
    for part_s in parts_s:
        cut.append(min(max(0.0, part_s), gap_s))  # in this order: what is no number counts for nothing
        gap_s -= cut[-1]
    return [*cut, gap_s]


def _covered_s(windows: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that are within any of the windows (begin, end)."""
    covered_s, until = 0.0, float("-inf")
    for begin, end in sorted(windows):
        covered_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered_s
