"""A worker that does not do its part beside one that does: every request is answered within its client's deadline, and
the worker is asked ever less."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cli.cluster.top import frame
from baton.v1 import fleet_pb2
from baton.v1 import worker_pb2 as pb
from gateway.api.fleet_service import FleetService
from gateway.attempts import answer_timeout
from gateway.link.worker_breaker import BreakerState, WorkerBreaker
from tests.gateway.calls import PROMPT, ids_of, read
from tests.support.client import make_request
from tests.support.gateway.fake_worker import tokens_of
from tests.support.gateway.misbehavior import MANNERS, Misbehavior
from tests.support.pace import patience

DEADLINE_S = patience(3)
NUM_AT_ONCE, NUM_LATER = 8, 12
_MOST = (1 << 32) - 1


async def ask(c, deadline_s: float = 20):
    request = make_request(PROMPT, max_tokens=6, ignore_eos=True)
    return await read(c.stub.Generate(request, timeout=deadline_s))


def link_of(c, worker):
    return next(link for link in c.gateway.registry.links if link.address == worker.address)


async def misbehave(c, worker, manner: str) -> None:
    """From the gateway's first word with it on."""
    worker.misbehavior = Misbehavior(manner)
    if manner == "capabilities":
        worker.hello.MergeFrom(
            pb.Hello(
                kv_gives=["\x00", "x" * 1000], kv_takes=["?" * 1000], host_id="\x1b" * 100, kv_token_bytes=_MOST,
                numerics_class="nobody's", limits=pb.Limits(max_model_len=_MOST, num_blocks=_MOST, max_num_seqs=_MOST),
                model=pb.ModelCard(transports=["", "carrier pigeon"], proposers=["?"], context=_MOST),
            )
        )  # fmt: skip
    link = link_of(c, worker)
    before = link.hello
    link.session.hang_up("a test ends it")
    await c.until(lambda: link.is_serving and link.hello is not before)


def num_asked(worker) -> int:
    return worker.kinds().count("prefill" if worker.role == "prefill" else "admit")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("manner", MANNERS)
async def test_with_a_good_one_beside_it_every_request_is_answered(cluster, role, manner):
    """Also the first ones, and those that come all at once."""
    numbers = (2, 1) if role == "prefill" else (0, 2)
    async with cluster(*numbers, split="always" if role == "prefill" else "auto") as c:
        bad, _good = getattr(c, role)
        await misbehave(c, bad, manner)
        answers = await asyncio.gather(*(ask(c, DEADLINE_S) for _ in range(NUM_AT_ONCE)))
        for _ in range(NUM_LATER):
            answers.append(await ask(c, DEADLINE_S))
        assert [ids_of(messages) for messages in answers] == [tokens_of(PROMPT, 6, 400)] * len(answers)
        breaker = link_of(c, bad).breaker
        if manner == "twice":
            assert breaker.state is BreakerState.CLOSED  # it does its work, and says so twice
        else:
            assert breaker.state is BreakerState.OPEN or num_asked(bad) < 2
            assert num_asked(bad) <= NUM_AT_ONCE + 4
        await c.idle()


async def test_a_decode_worker_that_answers_a_prompt_which_another_reads_is_to_blame(cluster):
    """Its token cannot be right, and nothing of it is given out."""
    async with cluster(1, 2, split="always") as c:
        (reader,), (bad, _good) = c.prefill, c.decode
        grant = bad._grant

        async def grant_and_answer(session, key, message) -> None:
            await grant(session, key, message)
            session.send(done=pb.Done(key=message.key, first_tokens=[pb.FirstToken(token_id=_MOST)], prefill_s=9.0))

        bad._grant = grant_and_answer
        reader.hold("prefill")  # so that both are asked, neither being proven
        asking = [asyncio.create_task(ask(c)) for _ in range(NUM_AT_ONCE)]
        await c.until(lambda: num_asked(bad) and link_of(c, bad).breaker._num_failures)
        reader.release("prefill")
        for messages in await asyncio.gather(*asking):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        assert not link_of(c, reader).breaker._num_failures
        await c.idle()


async def test_two_in_a_row_set_it_aside_and_one_probe_lets_it_back(cluster):
    async with cluster(0, 2) as c:
        bad, _good = c.decode
        while not all(link.breaker.state is BreakerState.CLOSED for link in c.gateway.registry.decode):
            await asyncio.gather(ask(c), ask(c))
        bad.is_silent = True
        link, before = link_of(c, bad), num_asked(bad)
        while link.breaker.state is not BreakerState.OPEN:
            await asyncio.gather(*(ask(c) for _ in range(4)))
        assert num_asked(bad) - before >= 2
        at_opening = num_asked(bad)
        for _ in range(10):
            await ask(c)
        assert num_asked(bad) <= at_opening + 1  # ten requests, one of which may have been a probe
        bad.is_silent = False
        while link.breaker.state is not BreakerState.CLOSED:
            link.breaker.retry_at = 0.0  # as if the pause were over
            await asyncio.gather(*(ask(c) for _ in range(6)))
        await c.idle()


async def test_a_probe_is_one_request(cluster):
    """Ten at once where the pause is over: one of them asks the worker that was set aside."""
    async with cluster(0, 2) as c:
        bad, good = c.decode
        link = link_of(c, bad)
        link_of(c, good).note_worked(math.inf)
        link.note_failure("nothing")
        assert link.breaker.state is BreakerState.OPEN
        link.breaker.retry_at = 0.0
        bad.hold("admit")
        good.hold("decode")  # so that the good one is full of work
        asking = [asyncio.create_task(ask(c)) for _ in range(10)]
        await c.until(lambda: num_asked(bad) == 1 and num_asked(good) >= 9)
        assert link.num_asked == 1
        bad.release("admit")
        good.release("decode")
        for messages in await asyncio.gather(*asking):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        assert link.breaker.state is BreakerState.CLOSED and link.num_asked == 0


async def test_a_stream_that_began_before_keeps_no_probe_away(cluster):
    """It may run for minutes; the worker is back before."""
    async with cluster(0, 2) as c:
        for worker in c.decode:
            worker.hold("decode")
        running = asyncio.create_task(ask(c))
        await c.until(lambda: any(worker.held for worker in c.decode))
        bad, good = sorted(c.decode, key=lambda worker: not worker.held)
        link = link_of(c, bad)
        await c.until(lambda: link.breaker.state is BreakerState.CLOSED)  # its first token is here
        link_of(c, good).note_worked(math.inf)
        for _ in range(2):
            link.note_failure("nothing")
        assert link.breaker.state is BreakerState.OPEN
        link.breaker.retry_at = 0.0
        later = [asyncio.create_task(ask(c)) for _ in range(8)]
        await c.until(lambda: link.breaker.state is BreakerState.CLOSED)
        assert num_asked(bad) > 1 and not running.done()
        for worker in c.decode:
            worker.release("decode")
        for messages in await asyncio.gather(running, *later):
            assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        assert link.num_asked == 0


async def test_a_new_worker_gets_one_request_first(cluster, monkeypatch):
    """Only beside proven workers; a stack of new ones starts with all of them."""
    monkeypatch.setattr(answer_timeout, "_MOST_ANSWER_S", patience(10))  # an Admit that is held here is no silence
    deadline_s = patience(60)
    async with cluster(0, 2) as c:
        for worker in c.decode:
            worker.hold("admit")  # a prompt that was read would prove it, while requests still come
        first = [asyncio.create_task(ask(c, deadline_s)) for _ in range(8)]
        await c.until(lambda: sum(map(num_asked, c.decode)) == 8)
        assert all(num_asked(worker) > 1 for worker in c.decode)
        for worker in c.decode:
            worker.release("admit")
        await asyncio.gather(*first)
        assert all(link.breaker.state is BreakerState.CLOSED for link in c.gateway.registry.decode)

        young, old = c.decode
        await young.stop()
        young.epoch = young.hello.epoch = young.epoch ^ 1
        young.held.clear()
        young.commands.clear()
        link = link_of(c, young)
        await c.until(lambda: not link.is_serving)
        await young.start(young.port)
        await c.until(lambda: link.is_serving)
        assert link.breaker.state is BreakerState.NEW
        young.hold("admit")
        old.hold("decode")
        later = [asyncio.create_task(ask(c, deadline_s)) for _ in range(8)]
        await c.until(lambda: num_asked(young) == 1 and len(old.held) == 7)
        assert link.num_asked == 1
        young.release("admit")
        old.release("decode")
        await asyncio.gather(*later)
        assert link.breaker.state is BreakerState.CLOSED


async def test_the_only_worker_is_waited_for(cluster):
    """It is slow to answer, and there is no other: the request stays."""
    async with cluster(0, 1) as c:
        c.decode[0].hold("admit")
        asking = asyncio.create_task(ask(c))
        link = c.gateway.registry.decode[0]
        await c.until(lambda: link.breaker.state is BreakerState.OPEN)
        c.decode[0].release("admit")
        assert ids_of(await asking) == tokens_of(PROMPT, 6, 400)
        assert c.decode[0].kinds() == ["admit"] and link.breaker.state is BreakerState.OPEN
        assert ids_of(await ask(c)) == tokens_of(PROMPT, 6, 400)  # asked, though it is set aside
        assert link.breaker.state is BreakerState.CLOSED


async def test_the_only_worker_has_no_room_after_a_silence(cluster):
    """Its answer comes after it was set aside, and is a refusal: the request waits in line until there is room."""
    async with cluster(0, 1) as c:
        worker = c.decode[0]
        worker.hold("admit")
        asking = asyncio.create_task(ask(c))
        link = c.gateway.registry.decode[0]
        await c.until(lambda: link.breaker.state is BreakerState.OPEN)
        link.breaker.retry_at = math.inf
        worker.refusals = ["no_room"] * 3
        worker.release("admit")
        assert ids_of(await asking) == tokens_of(PROMPT, 6, 400)
        assert worker.refusals == [] and num_asked(worker) == 4


async def test_what_operators_see(cluster, monkeypatch):
    async with cluster(0, 2) as c:
        bad, good = c.decode
        await ask(c)
        link_of(c, good).note_worked(math.inf)
        for _ in range(2):
            link_of(c, bad).note_failure("nothing")
        fleet = FleetService(c.gateway.registry, c.gateway.catalog, c.gateway.recent, c.gateway.index, None)
        views = {view.address: view for view in fleet.workers().workers}
        assert views[good.address].breaker == "closed" and not views[good.address].breaker_retry_s
        assert views[bad.address].breaker == "open" and 0 < views[bad.address].breaker_retry_s <= 1
        page = c.gateway.meters.exposition().body.decode()
        assert 'baton_worker_breakers{model_name="fake",state="open"} 1.0' in page
        monkeypatch.setenv("COLUMNS", "200")
        looked = frame("here", fleet.workers(), fleet_pb2.ListRequestsResponse(), "")
        assert "set aside" in looked


# ---- the breaker alone ----


def test_two_failures_in_a_row_open_a_proven_one_and_one_a_new_one():
    breaker = WorkerBreaker()
    assert breaker.note_failure(10.0) and breaker.state is BreakerState.OPEN and breaker.retry_at == 11.0
    assert not breaker.note_failure(10.5)  # of what had been asked before
    assert not breaker.note_work(9.0) and breaker.state is BreakerState.OPEN  # so had this
    assert not breaker.allows(10.9, 0, True) and breaker.allows(11.0, 0, True) and not breaker.allows(11.0, 1, True)
    assert breaker.note_work(11.5) and breaker.state is BreakerState.CLOSED
    assert breaker.note_failure(12.0) and breaker.retry_at == 14.0  # a first token, and then rubbish
    assert breaker.note_work(14.5)
    breaker.note_success(14.5)
    assert not breaker.note_failure(15.0) and not breaker.note_work(15.1)
    breaker.note_success(15.1)
    assert not breaker.note_failure(16.0) and breaker.allows(16.0, 99, True)
    assert breaker.note_failure(17.0) and breaker.retry_at == 18.0


def test_pauses_double_up_to_a_minute():
    breaker, at, pauses = WorkerBreaker(), 0.0, []
    for _ in range(9):
        assert breaker.note_failure(at)
        pauses.append(breaker.retry_at - at)
        at = breaker.retry_at
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@given(st.lists(st.tuples(st.sampled_from(["work", "failure"]), st.floats(0, 5), st.floats(0, 5)), max_size=60))
def test_a_breaker_is_never_open_for_good(steps):
    """After any sequence of events a worker takes a request a minute later, and work done then closes the breaker."""
    breaker, at = WorkerBreaker(), 0.0
    for kind, passed_s, age_s in steps:
        at += passed_s
        breaker.note_work(at - age_s) if kind == "work" else breaker.note_failure(at)
    assert breaker.allows(at + 60.0, 0, True)
    breaker.note_work(at + 60.0)
    assert breaker.state is BreakerState.CLOSED and breaker.allows(at + 60.0, 99, True)
