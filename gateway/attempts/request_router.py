"""Find workers for one request, except those that have refused or failed it."""

from collections.abc import Set

from baton.v1 import worker_pb2 as pb
from gateway.answer.answer import Answer
from gateway.attempts.tried_workers import TriedWorkers
from gateway.fleet.router import Placement, Router
from gateway.link.worker_link import WorkerLink
from gateway.prefix.prefix_matches import Matches
from gateway.request.request_record import RequestRecord
from gateway.routing.routing import RoutingRequest
from kvtransfer.naming import SPAN_TOKENS


class RequestRouter:
    """Ask the model's Router on behalf of one request, with its length so far and the workers that it has tried."""

    __slots__ = ("_router", "_matches", "_record", "_answer", "_tried")

    def __init__(self, router: Router, matches: Matches, record: RequestRecord, answer: Answer):
        self._router, self._matches, self._record, self._answer = router, matches, record, answer
        self._tried = TriedWorkers()

    @property
    def request(self) -> RoutingRequest:
        """The request as routing sees it: the tokens of an answer that is continued count like the prompt's."""
        request = self._record.routing_request
        if len(self._answer.choices) > 1:
            return request
        return request._replace(num_tokens=request.num_tokens + len(self._answer.choices[0].token_ids))

    @property
    def may_prefill_locally(self) -> bool:
        """Return whether the prompt needs no prefill worker."""
        return self._router.may_prefill_locally

    @property
    def max_start_wait_s(self) -> float:
        """Return how many seconds the request may wait for a worker that starts."""
        return self._router.max_start_wait_s

    def expects_worker(self) -> bool:
        """Return whether a worker that can serve the request may come soon."""
        return self._router.expects_worker(self.request)

    def route(self) -> Placement:
        """Choose the workers for the next attempt. Raises NoWorker."""
        return self._router.route(self.request, self._matches, self._tried.exclusions)

    def prefill_for(self, taker: WorkerLink) -> WorkerLink | None:
        """Return a prefill worker that `taker` can take KV from; None: `taker` reads the prompt. Raises NoWorker."""
        return self._router.prefill_for(taker, self.request, self._matches, self._tried.exclusions)

    def prefix_holder_for(self, taker: WorkerLink) -> WorkerLink | None:
        """Return a worker from which `taker` should pull a prefix; None: it should pull none."""
        return self._router.holder_for(taker, self._matches, self._tried.failed - self._tried.leaving)

    def is_usable(self, link: WorkerLink) -> bool:
        """Return whether this worker serves and has not refused the request."""
        return link.is_serving and link.worker_id not in self._tried.refused

    def has_untried(self, role: str) -> bool:
        """Return whether a worker of this role serves that could hold the request and has neither refused nor failed
        it."""
        return self.has_worker(role, exclude=self._tried.avoided, trusted_only=True)

    def has_worker(self, role: str, *, exclude: Set[bytes] = frozenset(), trusted_only: bool = False) -> bool:
        """Return whether a worker of this role serves that could hold the request.

        `exclude`: ids of workers that do not count. `trusted_only`: untrusted workers do not count either."""
        exclude = exclude | self._tried.unable
        return self._router.has_worker(role, self.request, exclude=exclude, trusted_only=trusted_only)

    def note_refusal(self, link: WorkerLink, refused: pb.Refused) -> None:
        """Note that `link` has no room for the request, or can never take it."""
        self._tried.note_refusal(link.worker_id, refused)
        self._record.note_retry(link.name, refused.reason)

    def forget_refusals(self) -> None:
        """Let workers that refused be asked again."""
        self._tried.forget_refusals()

    def note_failure(self, worker_id: bytes, is_leaving: bool) -> None:
        """Note that a worker failed the request; `is_leaving`: only because the worker drains."""
        self._tried.note_failure(worker_id, is_leaving)

    def note_fetch_started(self, source: WorkerLink | None, taker: WorkerLink, chosen_at: float) -> None:
        """Note that `taker` fetches KV from `source`, if any; the two were chosen at `chosen_at` (time.monotonic())."""
        if source is not None:
            self._router.note_fetch_started(source, taker, chosen_at)

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """Note that no KV of `source` arrived at `taker`: requests use other pairs for a while. Return False if this
        was only a try of a pair that had failed before."""
        return self._router.note_fetch_failed(source, taker, why)

    def note_fetch_done(self, source: WorkerLink | None, taker: WorkerLink) -> None:
        """Note that KV of `source`, if any, arrived at `taker`."""
        if source is not None:
            self._router.note_fetch_done(source, taker)

    def note_holder(self, worker_id: bytes, num_output_tokens: int = 0) -> None:
        """Note that a worker holds the spans of the prompt and of `num_output_tokens` of the answer."""
        self._matches.note(worker_id, (self._record.num_prompt_tokens + num_output_tokens - 1) // SPAN_TOKENS)

    def num_matched_spans(self, link: WorkerLink) -> int:
        """Return how many leading spans of the prompt this worker holds."""
        return self._matches.get(link.worker_id)

    def num_matched_tokens(self, link: WorkerLink) -> int:
        """Return how many leading tokens of the prompt this worker holds, in whole spans."""
        return self.num_matched_spans(link) * SPAN_TOKENS

    def decode_links(self, most: int) -> list[WorkerLink]:
        """Return at most `most` serving workers that may have the sequence, those with the longest prefix first."""
        return sorted(self._router.decode_workers(), key=self.num_matched_spans, reverse=True)[:most]
