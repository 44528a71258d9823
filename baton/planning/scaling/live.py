"""Counters of a running fleet, from what its gateways report of workers and requests."""

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

WARM_S = 120.0  # during which a new worker's latencies are those of its start
STARTS_S = 600.0  # the longest start: an address that has not answered for so long starts no worker
_MEASURED_TOKENS = 128  # of a prompt: the times of shorter ones tell more of round trips than of the rate


class GatewayLook(NamedTuple):
    """What one gateway reported at one time."""

    workers: pb.ListWorkersResponse
    requests: pb.ListRequestsResponse


class WorkerLoad(NamedTuple):
    """A serving worker, and how many sequences run there."""

    address: str
    num_running: int


class FleetWatch:
    """Turns reports of the fleet into counters: call `note` with each report."""

    def __init__(self, model: LoadModel):
        self._model = model
        # the previous report of each gateway, and its time
        self._before: dict[str, tuple[float, pb.ListRequestsResponse]] = {}
        self._at_s = NAN
        self._since: dict[str, float] = {}  # when a worker was first seen serving
        self._absent: dict[str, float] = {}  # since when a worker's address has no session
        self._lost_at: dict[str, float] = {}  # when a worker that served was first without a session
        self._counted: set[str] = set()  # addresses of workers that serve or start
        self.workers: dict[str, list[WorkerLoad]] = {role: [] for role in ROLES}

    def note(self, asked: Mapping[str, GatewayLook | None], at_s: float) -> FleetCounters | None:
        """Return the counters since the previous report; None for the first, and if no gateway answered. `asked`: the
        reports of gateways by address, None for one that did not answer."""
        looks = {name: look for name, look in asked.items() if look is not None}
        if not looks:  # nothing is forgotten, or workers would count as new in the next look
            return None
        before, seconds = self._before, at_s - self._at_s
        known = {name: before[name] for name in asked if name in before}  # without gateways that are gone
        self._before = known | {name: (at_s, look.requests) for name, look in looks.items()}
        self._at_s = at_s
        serving, starting = self._count_workers(looks, at_s, is_first=not before)
        if not before:
            return None
        spans = [
            (_seconds(*before[name], look.requests, at_s), *_since(before[name][1], look.requests))
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
            sum(look.requests.num_waiting for look in looks.values()),
            percentile([view.timing.ttft_s for view in recent], 95),
            percentile([view.timing.tpot_s for view in recent if view.timing.tpot_s > 0], 95),
            self._read_ratio(recent),
            self._write_ratio(recent, streams),
            serving,
            starting,
            num_silent=len(asked) - len(looks),
        )

    def with_placed(self, seen: FleetCounters, placed: Iterable[Placed]) -> FleetCounters:
        """Return the counters with placed workers that were not counted added to `starting`: a worker registers, or
        appears in DNS, only once its model is loaded, and one that drained or is away may be restarting. One that
        served and is away for longer than a start hangs, though its launcher sees a process."""
        hanging = {address for address, lost_at in self._lost_at.items() if self._at_s - lost_at >= STARTS_S}
        uncounted = Counter(worker.role for worker in placed if worker.address not in self._counted | hanging)
        return seen._replace(starting={role: seen.starting[role] + uncounted[role] for role in ROLES})

    def _count_workers(
        self, looks: Mapping[str, GatewayLook], at_s: float, is_first: bool
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the numbers of serving and of starting workers by role. A worker counts once, however many gateways
        see it."""
        found: dict[str, pb.WorkerView] = {}
        for look in looks.values():
            for view in look.workers.workers:
                if view.address not in found or view.state == "serving":
                    found[view.address] = view
        serving: dict[str, int] = dict.fromkeys(ROLES, 0)
        starting: dict[str, int] = dict.fromkeys(ROLES, 0)
        self.workers, self._counted = {role: [] for role in ROLES}, set()
        known, self._since = self._since, {}
        absent, self._absent = self._absent, {}
        lost_at, self._lost_at = self._lost_at, {}
        for address, view in found.items():
            if view.state == "connecting":
                # A worker that was there before is gone or restarts; neither counts as one that was added.
                if address in known or address in lost_at:
                    self._lost_at[address] = lost_at.get(address, at_s)
                since = self._absent[address] = absent.get(address, -math.inf if is_first or address in known else at_s)
                if at_s - since < STARTS_S:
                    starting[view.role] += 1
                    self._counted.add(address)
            elif view.state == "serving":
                since = self._since[address] = known.get(address, at_s - WARM_S * is_first)
                is_warm = at_s - since >= WARM_S and view.load.state != "compiling"
                (serving if is_warm else starting)[view.role] += 1
                self._counted.add(address)
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
    """Return the (dtype, form of KV) that most workers report; None if none does."""
    cards = (view.hello.model for look in looks for view in look.workers.workers)
    known = ((card.dtype, card.kv_dtype) for card in cards if card.dtype and card.kv_dtype in KV_FORMS)
    return next((dtypes for dtypes, _ in Counter(known).most_common(1)), None)


def device_of(looks: Iterable[GatewayLook]) -> str:
    """Return the device name that most workers report, of a GPU or of a CPU; "" if none does."""
    devices = [view.hello.model.device for look in looks for view in look.workers.workers]
    gpus, cpus = ([name for name in devices if name and names_gpu(name) == is_gpu] for is_gpu in (True, False))
    return next(iter(max(gpus, cpus, key=len)), "")


def _seconds(before_s: float, before: pb.ListRequestsResponse, now: pb.ListRequestsResponse, now_s: float) -> float:
    """Return the seconds between two reports of a gateway, by its own clock too: that of the scaler stands still while
    its host is suspended."""
    return max(now_s - before_s, now.uptime_s - before.uptime_s)


def _since(before: pb.ListRequestsResponse, now: pb.ListRequestsResponse) -> tuple[float, float, float, float]:
    """Return the requests that came, including refused ones; the answered ones; and the tokens that these read and
    wrote, since the lengths of others are unknown. A gateway that restarted counts from its start."""
    began_again = now.num_ended < before.num_ended or now.uptime_s < before.uptime_s
    base = pb.ListRequestsResponse() if began_again else before
    num = now.num_ended - base.num_ended + now.num_running - base.num_running
    answered = now.num_answered - base.num_answered
    if not answered:  # also of an older gateway, which does not report it
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
