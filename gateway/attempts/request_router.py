"""Find workers for one request, past those that have refused or failed it."""

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
    """What the router of the model finds for this request, by what its answer is like and which workers it has
    tried."""

    __slots__ = ("_router", "_matches", "_record", "_answer", "_tried")

    def __init__(self, router: Router, matches: Matches, record: RequestRecord, answer: Answer):
        self._router, self._matches, self._record, self._answer = router, matches, record, answer
        self._tried = TriedWorkers()

    @property
    def request(self) -> RoutingRequest:
        """The request as routing sees it: an answer that is continued is read like a part of the prompt."""
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
        """Return the longest wait for a worker that starts."""
        return self._router.max_start_wait_s

    def expects_worker(self) -> bool:
        """Return whether a worker that can serve the request may come soon."""
        return self._router.expects_worker(self.request)

    def route(self) -> Placement:
        """Choose the workers. Raises Unavailable."""
        return self._router.route(self.request, self._matches, self._tried.exclusions)

    def prefill_for(self, taker: WorkerLink) -> WorkerLink | None:
        """Return a prefill worker that `taker` can take KV from; None: `taker` reads the prompt. Raises Unavailable."""
        return self._router.prefill_for(taker, self.request, self._matches, self._tried.exclusions)

    def prefix_holder_for(self, taker: WorkerLink) -> WorkerLink | None:
        """Return a worker from which `taker` should pull a prefix, or None."""
        return self._router.holder_for(taker, self._matches, self._tried.failed - self._tried.leaving)

    def is_usable(self, link: WorkerLink) -> bool:
        """Return whether this worker serves and has not refused."""
        return link.is_serving and link.worker_id not in self._tried.refused

    def has_untried(self, role: str) -> bool:
        """Return whether a worker serves in this role that could hold the request and has neither refused nor failed
        it."""
        return self._has_other(role, self._tried.avoided)

    def has_another(self, role: str, than: bytes = b"") -> bool:
        """Return whether a worker other than `than` serves in this role that could hold the request, and is not set
        aside."""
        return self._has_other(role, frozenset((than,)))

    def has_any(self, role: str) -> bool:
        """Return whether a worker serves in this role that could hold the request, be it set aside."""
        return self._router.has_any(role, self.request, self._tried.unable)

    def _has_other(self, role: str, avoid: Set[bytes]) -> bool:
        return self._router.has_other(role, self.request, avoid | self._tried.unable)

    def note_refusal(self, link: WorkerLink, refused: pb.Refused) -> None:
        """`link` has no room for the request, or says that it can never take it."""
        self._tried.note_refusal(link.worker_id, refused)
        self._record.note_retry(link.name, refused.reason)

    def forget_refusals(self) -> None:
        """Ask every worker again."""
        self._tried.forget_refusals()

    def note_failure(self, worker_id: bytes, is_leaving: bool) -> None:
        """This worker has failed the request; if `is_leaving`, only because it drains."""
        self._tried.note_failure(worker_id, is_leaving)

    def note_fetch_started(self, source: WorkerLink | None, taker: WorkerLink, chosen_at: float) -> None:
        """KV of `source`, if any, is fetched by `taker`; they were chosen at `chosen_at` (time.monotonic())."""
        if source is not None:
            self._router.note_fetch_started(source, taker, chosen_at)

    def note_fetch_failed(self, source: WorkerLink, taker: WorkerLink, why: str) -> bool:
        """No KV of `source` came to `taker`: requests use other pairs for a while. Return False where it was known that
        none might."""
        return self._router.note_fetch_failed(source, taker, why)

    def note_fetch_done(self, source: WorkerLink | None, taker: WorkerLink) -> None:
        """KV of `source`, if any, came to `taker`."""
        if source is not None:
            self._router.note_fetch_done(source, taker)

    def note_holder(self, worker_id: bytes, num_output_tokens: int = 0) -> None:
        """This worker has read the prompt and written `num_output_tokens` of the answer: it holds their spans."""
        self._matches.note(worker_id, (self._record.num_prompt_tokens + num_output_tokens - 1) // SPAN_TOKENS)

    def num_matched_spans(self, link: WorkerLink) -> int:
        """Return how many spans of the prompt this worker holds."""
        return self._matches.get(link.worker_id)

    def num_matched_tokens(self, link: WorkerLink) -> int:
        """Return how many tokens of the prompt this worker holds."""
        return self.num_matched_spans(link) * SPAN_TOKENS

    def decode_links(self, most: int) -> list[WorkerLink]:
        """Return at most `most` serving workers that may have the sequence, longest prefix first."""
        return sorted(self._router.decode_workers(), key=self.num_matched_spans, reverse=True)[:most]
