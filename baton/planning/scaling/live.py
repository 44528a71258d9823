"""Counters of a running fleet, from what its gateways say of workers and requests."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.engine.core.device import names_gpu
from baton.loadgen.summary import percentile
from baton.planning.scaling.counters import NAN, FleetCounters, Placed
from baton.planning.scaling.load_model import LoadModel
from baton.protocol import ROLES
from baton.v1 import fleet_pb2 as pb
from kvtransfer.layout import KV_FORMS

WARM_S = 120.0  # for so long a new worker's latencies are those of its start
STARTS_S = 600.0  # no start takes longer: an address where nobody has answered for so long starts no worker
_MEASURED_TOKENS = 128  # of a prompt: a shorter one says more of the round trips than of the rate


class GatewayLook(NamedTuple):
    """What one gateway said at once."""

    workers: pb.ListWorkersResponse
    requests: pb.ListRequestsResponse


class WorkerLoad(NamedTuple):
    """A worker that serves, and the sequences that run there."""

    address: str
    num_running: int


class FleetWatch:
    """`note` each look at the fleet; it returns what happened since the one before, or None for the first."""

    def __init__(self, model: LoadModel):
        self._model = model
        self._before: dict[str, tuple[float, pb.ListRequestsResponse]] = {}  # what each gateway said last, and when
        self._at_s = NAN
        self._since: dict[str, float] = {}  # when a worker was first seen to serve
        self._absent: dict[str, float] = {}  # since when an address of a worker has no session
        self._known: set[str] = set()  # addresses that gateways know of
        self.workers: dict[str, list[WorkerLoad]] = {role: [] for role in ROLES}

    def note(self, asked: Mapping[str, GatewayLook | None], at_s: float) -> FleetCounters | None:
        """`asked`: gateways by address; None where one did not answer. Where none did the load is unknown."""
        before, seconds = self._before, at_s - self._at_s
        looks = {name: look for name, look in asked.items() if look is not None}
        known = {name: before[name] for name in asked if name in before}  # not of those that are gone
        self._before = known | {name: (at_s, look.requests) for name, look in looks.items()}
        self._at_s = at_s
        serving, starting = self._count_workers(looks, at_s, is_first=not before)
        if not before:
            return None
        spans = [
            (at_s - before[name][0], *_since(before[name][1], look.requests))
            for name, look in looks.items()
            if name in before
        ]
        _, _, answered, prompt, output = map(sum, zip(*spans, strict=True)) if spans else (NAN,) * 5
        recent = [
            view
            for look in looks.values()
            for view in look.requests.recent
            if view.outcome == "ok" and view.ended_s <= seconds
        ]
        streams = sum(load.num_running for load in self.workers["decode"]) / max(1, len(self.workers["decode"]))
        return FleetCounters(
            at_s,
            sum(came / span_s for span_s, came, *_ in spans) if spans else NAN,
            prompt / answered * (1 - _cached_share(recent)) if answered else NAN,
            output / answered if answered else NAN,
            sum(look.requests.num_waiting for look in looks.values()) if looks else NAN,
            percentile([view.timing.ttft_s for view in recent], 95),
            percentile([view.timing.tpot_s for view in recent if view.timing.tpot_s > 0], 95),
            self._read_ratio(recent),
            self._write_ratio(recent, streams),
            serving,
            starting,
            num_silent=len(asked) - len(looks),
        )

    def with_placed(self, seen: FleetCounters, placed: Iterable[Placed]) -> FleetCounters:
        """Return the counters, with those that no gateway knows of yet among the workers that start: one registers, or
        has its address in the DNS, only with its model loaded."""
        unknown = Counter(worker.role for worker in placed if worker.address not in self._known)
        return seen._replace(starting={role: seen.starting[role] + unknown[role] for role in ROLES})

    def _count_workers(
        self, looks: Mapping[str, GatewayLook], at_s: float, is_first: bool
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return those that serve and those that start, by role. A worker counts once, whichever gateways see it."""
        found: dict[str, pb.WorkerView] = {}
        for look in looks.values():
            for view in look.workers.workers:
                if view.address not in found or view.state == "serving":
                    found[view.address] = view
        self._known = {*found}
        serving: dict[str, int] = dict.fromkeys(ROLES, 0)
        starting: dict[str, int] = dict.fromkeys(ROLES, 0)
        self.workers = {role: [] for role in ROLES}
        known, self._since = self._since, {}
        absent, self._absent = self._absent, {}
        for address, view in found.items():
            if view.state == "connecting":
                # One that was there before is gone, or starts again; either way it is none that was added.
                since = self._absent[address] = absent.get(address, -math.inf if is_first or address in known else at_s)
                starting[view.role] += at_s - since < STARTS_S
            elif view.state == "serving":
                since = self._since[address] = known.get(address, at_s - WARM_S * is_first)
                is_warm = at_s - since >= WARM_S and view.load.state != "compiling"
                (serving if is_warm else starting)[view.role] += 1
                self.workers[view.role].append(WorkerLoad(address, view.load.num_running))
        return serving, starting

    def _read_ratio(self, recent: Sequence[pb.RequestView]) -> float:
        pairs = [(view.timing.prefill_s, view.prompt_tokens - view.cached_tokens) for view in recent]
        ratios = [took / self._model.read_s(num) for took, num in pairs if num >= _MEASURED_TOKENS and took > 0]
        return statistics.median(ratios) if ratios else NAN

    def _write_ratio(self, recent: Sequence[pb.RequestView], streams: float) -> float:
        ratios = [
            view.timing.tpot_s / self._model.token_s(streams, view.prompt_tokens + view.output_tokens / 2)
            for view in recent
            if view.timing.tpot_s > 0
        ]
        return statistics.median(ratios) if ratios else NAN


def dtypes_of(looks: Iterable[GatewayLook]) -> tuple[str, str] | None:
    """Return in which dtype most workers compute and in which form they keep KV, as they say; None: none has said
    it."""
    cards = (view.hello.model for look in looks for view in look.workers.workers)
    known = ((card.dtype, card.kv_dtype) for card in cards if card.dtype and card.kv_dtype in KV_FORMS)
    return next((dtypes for dtypes, _ in Counter(known).most_common(1)), None)


def device_of(looks: Iterable[GatewayLook]) -> str:
    """Return what computes in most workers that say it, in the words of one of them: a GPU, or a CPU; "": none says
    it."""
    devices = [view.hello.model.device for look in looks for view in look.workers.workers]
    gpus, cpus = ([name for name in devices if name and names_gpu(name) == is_gpu] for is_gpu in (True, False))
    return next(iter(max(gpus, cpus, key=len)), "")


def _since(before: pb.ListRequestsResponse, now: pb.ListRequestsResponse) -> tuple[float, float, float, float]:
    """Return the requests that came, refused ones too, those that were answered, and the tokens read and written: of
    the length of others nobody knows. A gateway that began again counts from its start."""
    began_again = now.num_ended < before.num_ended or now.uptime_s < before.uptime_s
    base = pb.ListRequestsResponse() if began_again else before
    num = now.num_ended - base.num_ended + now.num_running - base.num_running
    answered = now.num_answered - base.num_answered
    if not answered:  # as of a gateway of an older version, which does not say it
        return max(0.0, num), 0.0, 0.0, 0.0
    return (
        max(0.0, num),
        answered,
        now.num_input_tokens - base.num_input_tokens,
        now.num_output_tokens - base.num_output_tokens,
    )


def _cached_share(recent: Sequence[pb.RequestView]) -> float:
    prompt = sum(view.prompt_tokens for view in recent)
    return sum(view.cached_tokens for view in recent) / prompt if prompt else 0.0
