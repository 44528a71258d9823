"""List the requests of this gateway for operators: those that run and those that ended last, without content."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.service.clock import now
from baton.service.observe.bottleneck import PromptFacts, aware_of_host, bottleneck_of_stack
from baton.service.observe.cpu_usage import CpuUsage
from baton.v1 import fleet_pb2 as pb
from gateway.observe.meters import outcome
from gateway.request.bottlenecks import seconds_by_bottleneck
from gateway.request.request_record import RequestRecord
from gateway.request.request_state import RequestState
from gateway.request.timing import timing

NUM_KEPT = 500  # ended requests, about 1 KB each
_DEFAULT_RUNNING, _DEFAULT_RECENT = 20, 200
_BOUND_WINDOW_S = 60.0  # up to the last end
# The phase (of timing.PHASES) of a request in each state. FETCHING is `prefill`: the decode worker fetches while the
# prompt is being read.
PHASE_OF: dict[RequestState | None, str] = {
    None: "tokenize",
    RequestState.AWAITING_CREDIT: "admit",
    RequestState.ADMITTING: "admit",
    RequestState.AWAITING_PREFILL: "prefill_queue",
    RequestState.PREFILLING: "prefill_queue",
    RequestState.FETCHING: "prefill",
    RequestState.DECODING: "decode",
    RequestState.ENDING: "decode",
    RequestState.ATTACHING: "decode",
}


class EndedRequest(NamedTuple):
    """A request that has ended, without its prompt."""

    record: RequestRecord
    how: tuple[str, str]  # outcome and reason
    at: float  # time.monotonic()


class RecentRequests:
    """The running and the latest ended requests. Belongs to the event loop."""

    def __init__(self, worker_started_at: Callable[[], float] = lambda: 0.0) -> None:
        """Begin without requests. `worker_started_at()`: when the newest worker joined first, in time.monotonic()."""
        self._worker_started_at = worker_started_at
        self._running: dict[int, RequestRecord] = {}
        self.last: deque[EndedRequest] = deque(maxlen=NUM_KEPT)  # ended requests, the latest one at the end
        self._since = now()
        self._cpu = CpuUsage()
        self._num_ended = self._num_answered = self._num_input = self._num_output = 0

    @property
    def num_running(self) -> int:
        """The number of requests in the gateway."""
        return len(self._running)

    @property
    def num_running_by_model(self) -> dict[str, int]:
        """The number of requests in the gateway by model; "" for those that named none that is served, or are not read
        yet."""
        return dict(Counter(record.model for record in self._running.values()))

    def began(self, record: RequestRecord) -> None:
        """Add a request."""
        self._running[id(record)] = record

    def ended(self, record: RequestRecord, error: BaseException | None) -> None:
        """Keep a request that has ended, however it ended, without its prompt."""
        self._running.pop(id(record), None)
        record.validated = record.validated and record.validated.without_content()
        self.last.append(EndedRequest(record, outcome(error), now()))
        self._num_ended += 1
        if error is None:  # only these have known lengths
            self._num_answered += 1
            self._num_input += record.num_prompt_tokens or 0
            self._num_output += record.num_output_tokens

    def listed(self, request: pb.ListRequestsRequest, num_waiting: int) -> pb.ListRequestsResponse:
        """Return running requests, the oldest first, and ended ones, the latest first."""
        answer = pb.ListRequestsResponse(
            num_running=len(self._running),
            num_waiting=num_waiting,
            num_ended=self._num_ended,
            num_answered=self._num_answered,
            num_input_tokens=self._num_input,
            num_output_tokens=self._num_output,
            uptime_s=now() - self._since,
            bound=self._bottleneck(),
        )
        for record in list(self._running.values())[: request.max_running or _DEFAULT_RUNNING]:
            answer.running.append(_view(record, ("", ""), None))
        for record, how, ended_at in list(reversed(self.last))[: request.max_recent or _DEFAULT_RECENT]:
            answer.recent.append(_view(record, how, ended_at))
        return answer

    def _bottleneck(self) -> str:
        """Return the bottleneck of the stack, by the latest answered requests."""
        if not self.last:
            return ""
        until = self.last[-1].at
        last = [record for record, how, at in self.last if how[0] == "ok" and until - at < _BOUND_WINDOW_S]
        spent_s: Counter[str] = Counter()
        for record in last:
            spent_s.update(seconds_by_bottleneck(record.stamps, record.measured))
        window_s = until - min((each.stamps.received for each in last), default=until)
        return aware_of_host(
            bottleneck_of_stack(spent_s, window_s, self._facts(last)), self._cpu.num_cores, self._cpu.busy()
        ).sentence

    def _facts(self, last: Sequence[RequestRecord]) -> PromptFacts:
        """Return what the prompts of `last` were like, compared with those before the newest worker joined."""
        started_at = self._worker_started_at()
        before = [record for record, how, _ in self.last if how[0] == "ok" and record.stamps.received < started_at]
        since = [record for record in last if record.stamps.received >= started_at] or last
        num_prompt, num_cached = _prompt_tokens(last)
        return PromptFacts((num_prompt - num_cached) / max(1, len(last)), _cached_share(since), _cached_share(before))


def _prompt_tokens(records: Sequence[RequestRecord]) -> tuple[int, int]:
    """Return the tokens of all prompts, and how many of them were found in caches."""
    return sum(each.num_prompt_tokens or 0 for each in records), sum(each.num_cached_tokens for each in records)


def _cached_share(records: Sequence[RequestRecord]) -> float:
    num_prompt, num_cached = _prompt_tokens(records)
    return num_cached / num_prompt if num_prompt else 0.0


def _view(record: RequestRecord, how: tuple[str, str], ended_at: float | None) -> pb.RequestView:
    at = now()
    view = pb.RequestView(
        request_id=record.request_id,
        trace_id=f"{record.context.trace_id:032x}",
        phase=PHASE_OF[record.phase],
        outcome=how[0],
        reason=how[1],
        age_s=at - record.stamps.received,
        ended_s=0.0 if ended_at is None else at - ended_at,
        prompt_tokens=record.num_prompt_tokens or 0,
        cached_tokens=record.num_cached_tokens,
        output_tokens=record.num_output_tokens,
        num_attempts=record.num_attempts,
        tenant=record.tenant,
        model=record.model,
    )
    if record.decision is not None:
        view.prefill, view.decode = record.decision.prefill or "", record.decision.decode or ""
    view.timing.CopyFrom(timing(record.stamps, record.measured, record.num_longest_output))
    return view
