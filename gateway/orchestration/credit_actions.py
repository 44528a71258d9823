"""Actions that ask decode workers for credit, and wait in a queue until one grants it."""

from baton.service.clock import now
from baton.service.errors import NoWorker
from baton.v1 import worker_pb2 as pb
from gateway.link.worker_link import WorkerLink
from gateway.orchestration.request_context import RequestContext
from gateway.orchestration.states import Occurrence
from gateway.queue.waiting_queue import WaitingQueue
from gateway.request.request_state import RequestState
from gateway.routing.routing import AWAITS_ADAPTER, describe_needs


def ask_for_credit(request: RequestContext, event: Occurrence[object]) -> RequestState:
    """Choose workers and send Admit. Raises NoWorker if no worker serves and none may come, Overloaded if the answer
    would be too late, and BatonError (POISON) if workers died of the prompt."""
    record, queues = request.record, request.queues
    if not request.limits.check_deaths():
        return queue_for_worker(request, NoWorker("no worker was heard again"))
    try:
        placement = request.router.route()
    except NoWorker as error:
        return queue_for_worker(request, error)
    request.failures.note_replaced()
    # A request that has waited in a queue is served, even if it will be late.
    if record.decision is None and not request.queue_wait.is_queued:
        record.queued.check(placement.decision, queues.prefill.wait_s(record.queued))
    record.decision = placement.decision
    record.stamps.routed = record.stamps.routed or now()
    record.num_attempts += request.attempt.spec is None
    request.make_spec()
    request.attempt.prefill_link = placement.prefill
    # The decode worker of a later attempt first pulls the prefix that other workers hold.
    request.attempt.admit(placement.decode, prefills_on_admit=placement.prefill is None and record.num_attempts == 1)
    load, decision = request.attempt.load, placement.decision
    load.count_prefill(placement.prefill or placement.decode, decision.prefill_s)
    load.count_decode(placement.decode, decision.decode_s)
    return RequestState.ADMITTING


def queue_for_credit(request: RequestContext, event: Occurrence[pb.Refused]) -> None:
    """Ask the next decode worker, or wait in a queue once all have refused. Raises NoWorker and Overloaded."""
    note_refusal(request, request.attempt.decode.link, event.payload, request.queues.credit)
    drop_decode(request)
    router = request.router
    if router.has_untried("decode"):
        request.post_capacity()
        return
    router.forget_refusals()
    if event.payload.reason in AWAITS_ADAPTER:
        request.queue_wait.join_for_worker(request.queues.decode_start)
    elif router.has_worker("decode"):
        request.queue_wait.join(request.queues.credit)
    else:
        message = f"no decode worker that serves can hold {describe_needs(router.request)}"
        queue_for_worker(request, NoWorker(message))


def queue_for_worker(request: RequestContext, error: NoWorker) -> RequestState:
    """Wait in a queue for a worker that replaces a lost one, or that can hold the request. Raises the last failure, or
    `error` if there was none, if no worker may come."""
    request.failures.check_wait(error)
    if request.router.expects_worker():  # the time that a worker takes to start does not count as a wait for room
        request.queue_wait.wait_longer(request.router.max_start_wait_s)
    request.queue_wait.join_for_worker(request.queues.decode_start)
    return RequestState.AWAITING_CREDIT


def drop_decode(request: RequestContext) -> None:
    """Close the decode leg, and count nothing as work of the chosen workers."""
    request.attempt.load.drop()
    request.attempt.drop_decode()


def note_refusal(request: RequestContext, link: WorkerLink, refused: pb.Refused, queue: WaitingQueue) -> None:
    """Note that a worker refused, in the request and in the queue in which it may have to wait."""
    queue.refused_for = refused.reason
    request.router.note_refusal(link, refused)
    request.queue_wait.note_refusal(refused)
