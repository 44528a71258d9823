"""A request's own view of the fleet, and its machine, without a gateway around them."""

from types import SimpleNamespace

import pytest

from baton.service.clock import now
from baton.service.errors import Unavailable
from baton.v1 import worker_pb2 as pb
from gateway.attempts.request_router import RequestRouter
from gateway.attempts.retry_throttle import RetryThrottle
from gateway.orchestration.machine import RequestMachine
from gateway.orchestration.request_context import PreparedRequest, RequestContext
from gateway.prefix.prefix_matches import Matches
from gateway.queue.waiting_queue import WaitingQueues
from gateway.request.request_state import RequestState
from gateway.routing.routing import RoutingRequest
from tests.support.gateway.request_records import record

FULL, SHORT, BROKEN, LEAVING, GOOD = (bytes([number]) * 4 for number in range(5))


class Fleet:
    """A Router of five workers that remembers which of them it had to avoid."""

    def __init__(self):
        self.avoided: list[frozenset[bytes]] = []

    def has_worker(self, role, ask, exclude, trusted_only) -> bool:
        assert trusted_only
        self.avoided.append(frozenset(exclude))
        return bool({FULL, SHORT, BROKEN, LEAVING, GOOD} - exclude)

    def expects_worker(self, ask) -> bool:
        return False

    def holder_for(self, taker, matches, avoid):
        self.avoided.append(frozenset(avoid))

    def route(self, ask, matches, excluded):
        self.avoided += map(frozenset, excluded)
        raise Unavailable("no decode worker serves", 1.0, reason="NO_WORKER")


def a_record():
    asked = record()
    asked.routing_request = RoutingRequest(12, 20)
    return asked


def an_answer(num_choices: int = 1, num_tokens: int = 0):
    choice = SimpleNamespace(token_ids=list(range(num_tokens)))
    return SimpleNamespace(choices=[choice] * num_choices, key_id="key", has_begun=bool(num_tokens), is_finished=False)


def link(worker_id: bytes):
    return SimpleNamespace(worker_id=worker_id, name=worker_id.hex(), is_serving=True)


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def router(fleet):
    router = RequestRouter(fleet, Matches(), a_record(), an_answer())
    router.note_refusal(link(FULL), pb.Refused(reason="kv_full"))
    router.note_refusal(link(SHORT), pb.Refused(reason="too_long"))
    router.note_failure(BROKEN, is_leaving=False)
    router.note_failure(LEAVING, is_leaving=True)
    return router


def test_workers_that_refused_or_failed_are_not_untried(router, fleet):
    assert router.has_untried("decode")
    assert fleet.avoided == [{FULL, SHORT, BROKEN, LEAVING}]
    assert not router.is_usable(link(FULL)) and router.is_usable(link(GOOD))


def test_only_what_a_worker_can_never_take_is_not_forgotten(router, fleet):
    router.forget_refusals()
    assert router.is_usable(link(FULL)) and router.is_usable(link(SHORT))
    with pytest.raises(Unavailable):
        router.route()
    assert fleet.avoided == [{BROKEN, LEAVING}, {SHORT}]
    assert router.has_worker("decode", exclude={GOOD}, trusted_only=True)
    assert fleet.avoided[-1] == {GOOD, SHORT}


def test_a_worker_that_drains_still_gives_kv(router, fleet):
    assert router.prefix_holder_for(link(GOOD)) is None
    assert fleet.avoided == [{BROKEN}]


@pytest.mark.parametrize("num_choices, expected", [(1, 12 + 7), (2, 12)])
def test_a_single_choice_that_is_continued_is_read_with_the_prompt(fleet, num_choices, expected):
    router = RequestRouter(fleet, Matches(), a_record(), an_answer(num_choices, num_tokens=7))
    assert router.request.num_tokens == expected


async def test_a_machine_without_workers_ends_with_the_router_s_error(fleet):
    prepared = PreparedRequest(None, Matches(), now() + 60, b"digest", is_resumed=False)
    request = RequestContext(
        fleet, WaitingQueues(4), RetryThrottle(), an_answer(), a_record(), prepared, max_queue_wait_s=1.0
    )
    machine = RequestMachine(request)
    with pytest.raises(Unavailable, match="no decode worker serves"):
        await machine.run()
    assert machine.state is RequestState.ENDED and request.record.phase is RequestState.ADMITTING
    machine.close()
