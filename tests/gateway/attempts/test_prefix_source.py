"""A prefix that another worker holds is asked for, and the prompt is computed where it does not come."""

import asyncio

import pytest

from gateway.attempts import prefix_source
from gateway.fleet import kv_pair_breakers
from gateway.link.worker_link import LinkState
from gateway.routing.latency_model import PaceEstimator
from tests.gateway.calls import PROMPT, generate, ids_of
from tests.support.gateway.fake_worker import tokens_of
from tests.support.waiting import until_async

MAX_TOKENS = 4
NUM_PREFIX = 256  # whole spans of the prompt with something left to compute


def test_tokens_in_place_of_an_offer():
    """Tokens that arrive without an offer are answered with no source."""
    said = []
    source = prefix_source.PrefixSource(lambda sources, holder: said.append((sources, holder)), said.clear)
    source.add(None, 0, 0, [1], [], 0)
    assert said == [([], None)] and not source.flush()


async def wait_for_index(c, holder) -> None:
    """Until the index has heard what the worker holds."""
    hashes = c.pipeline.prefix_hashes.spans("default", PROMPT[:NUM_PREFIX]).hashes

    async def has_heard() -> bool:
        return any(worker.startswith(holder.instance) for worker in await c.gateway.index.lookup(hashes))

    await until_async(has_heard)


async def read_elsewhere(c, before=lambda holder, reader: None):
    """Has one prefill worker read the prompt and asks again when only the other one has room; the answer, the Prefill
    that the other one got, and the Offers that were made."""
    for link in c.gateway.registry.links:
        link.hello.kv_token_bytes = 1
    c.fleet.candidates._facts.clear()
    first = await generate(c, max_tokens=MAX_TOKENS)
    await c.idle()
    for link in c.gateway.registry.links:
        link.pace_estimator = PaceEstimator()  # a fake reads so fast that nothing would be pulled
    holder, reader = sorted(c.prefill, key=lambda worker: "prefill" not in worker.kinds())
    assert "prefill" not in reader.kinds()
    await wait_for_index(c, holder)
    holder.refusals = ["queue_full"] * 1000
    for worker in c.decode:
        worker.spans.clear()
    for link in c.gateway.registry.decode:
        c.gateway.index.drop(link.worker_id)  # or it would be asked, where its address comes first
    before(holder, reader)
    again = await generate(c, max_tokens=MAX_TOKENS)
    assert ids_of(again) == ids_of(first)
    prefill = next(message for kind, message in reader.commands if kind == "prefill")
    offers = [message for worker in c.workers for kind, message in worker.commands if kind == "offer"]
    return again, prefill, offers


async def test_a_prefix_is_pulled(cluster, monkeypatch):
    monkeypatch.setattr(prefix_source, "OFFER_WAIT_S", 10.0)  # the machine may be busy; what is late is tested below
    async with cluster(num_prefill=2) as c:
        messages, prefill, offers = await read_elsewhere(c)
        assert len(prefill.sources) == 1 and messages[-1].usage.cached_tokens == NUM_PREFIX
        (offer,) = offers
        assert len(offer.spans.hashes) == NUM_PREFIX // 64 and offer.taker.instance in [w.instance for w in c.prefill]
        assert offer.key.attempt != prefill.key.attempt and offer.budget_ms > 0
        await c.idle()


def forget(holder, reader) -> None:
    holder.spans.clear()


def say_nothing(holder, reader) -> None:
    holder.hold("offer")


def fail(holder, reader) -> None:
    holder.failures["offer"] = [(13, "WHY")]


@pytest.mark.parametrize("trouble", [forget, say_nothing, fail])
async def test_what_does_not_come_is_computed(cluster, trouble):
    async with cluster(num_prefill=2) as c:
        messages, prefill, offers = await read_elsewhere(c, trouble)
        assert len(offers) == 1 and not prefill.sources and messages[-1].usage.cached_tokens == 0
        for worker in c.prefill:
            worker.release("offer")
        await c.idle()


@pytest.mark.parametrize("trouble", [forget, say_nothing, fail])
async def test_a_holder_that_offers_nothing_is_not_tried(cluster, trouble):
    """Where its KV had not come to this reader: the next one that it could give some waited for 30 s."""
    async with cluster(num_prefill=2) as c:
        breakers = c.fleet.candidates.kv_pair_breakers

        def open_breaker(holder, reader) -> None:
            trouble(holder, reader)
            links = {link.address: link for link in c.gateway.registry.prefill}
            breakers.note_fetch_failed(links[holder.address], links[reader.address], "cut off")
            for breaker in opened():
                breaker.until = 0.0

        def opened() -> list:
            return [each for of_taker in breakers._open.values() for each in of_taker.values()]

        _, _, offers = await read_elsewhere(c, open_breaker)
        (breaker,) = opened()
        assert len(offers) == 1 and not breaker.is_tried and not breaker.until
        for worker in c.prefill:
            worker.release("offer")
        await c.idle()


def cut_off(holder, reader) -> None:
    holder.is_cut_off = True


async def test_a_holder_whose_kv_does_not_come_is_left_for_a_while(cluster, monkeypatch, caplog):
    """Each prompt that continued an answer waited for it anew, and nobody heard of it."""
    monkeypatch.setattr(prefix_source, "OFFER_WAIT_S", 10.0)
    monkeypatch.setattr(kv_pair_breakers, "_FIRST_PAUSE_S", 1000.0)
    async with cluster(num_prefill=2) as c:
        messages, prefill, offers = await read_elsewhere(c, cut_off)
        assert len(prefill.sources) == len(offers) == 1 and messages[-1].usage.cached_tokens == 0
        holder = next(worker for worker in c.prefill if worker.is_cut_off)
        breakers = c.fleet.candidates.kv_pair_breakers

        async def ask_again() -> int:
            await c.idle()
            for link in c.gateway.registry.links:
                link.pace_estimator = PaceEstimator()
                if link.address != holder.address:
                    c.gateway.index.drop(link.worker_id)
            for worker in c.workers:
                if worker is not holder:
                    worker.spans.clear()
            await generate(c, max_tokens=MAX_TOKENS)
            return holder.kinds().count("offer")

        assert await ask_again() == 1 and caplog.text.count("no KV comes from a worker") == 1
        (breaker,) = (each for of_taker in breakers._open.values() for each in of_taker.values())
        breaker.until = 0.0
        assert await ask_again() == 2 and breaker.pause_s == 300.0, "twice the first one, or the longest"
        breaker.until, holder.is_cut_off = 0.0, False
        assert await ask_again() == 3 and not breakers.any_open


@pytest.mark.parametrize("reason", ["LEASE_EXPIRED", "TICKET_REFUSED", "DIGEST_MISMATCH", "KV_FULL", "INTERNAL"])
async def test_a_pull_that_fails_otherwise_leaves_nobody(cluster, monkeypatch, reason):
    """What is between the two workers is not at fault."""
    monkeypatch.setattr(prefix_source, "OFFER_WAIT_S", 10.0)

    def fail_otherwise(holder, reader) -> None:
        holder.is_cut_off, holder.pull_failure = True, reason

    async with cluster(num_prefill=2) as c:
        _, prefill, _ = await read_elsewhere(c, fail_otherwise)
        await c.idle()
        assert prefill.sources and not c.fleet.candidates.kv_pair_breakers.any_open


async def test_what_is_cheap_is_computed(cluster):
    async with cluster(num_prefill=2) as c:
        _, prefill, offers = await read_elsewhere(
            c, lambda *_: [link.note_prefill(128, 1e-4) for link in c.gateway.registry.links]
        )
        assert not offers and not prefill.sources
        await c.idle()


@pytest.mark.parametrize("is_there", [True, False])
async def test_what_a_draining_worker_has_written_goes_along(cluster, monkeypatch, is_there):
    """All full spans of prompt and answer are asked for; no prefill worker reads the prompt again for the rest."""
    monkeypatch.setattr(prefix_source, "OFFER_WAIT_S", 10.0)
    async with cluster(num_decode=2) as c:
        for link in c.gateway.registry.links:
            link.hello.kv_token_bytes, link.pace_estimator = 1, PaceEstimator()
        c.fleet.candidates._facts.clear()
        asking = asyncio.create_task(generate(c, max_tokens=300))
        running = c.pipeline.running
        await c.until(lambda: any(each.request.answer.num_output_tokens >= 40 for each in running.values()))
        (left,) = (worker for worker in c.decode if worker.held)
        (taker,) = (worker for worker in c.decode if worker is not left)
        left.hold("decode")
        left.state = "draining"
        if is_there:
            left.seal(c.pipeline.prefix_hashes.spans("default", PROMPT, tokens_of(PROMPT, 300, 400)).hashes)
        else:
            left.spans.clear()
        await c.until(lambda: any(link.state is LinkState.DRAINING for link in c.gateway.registry.decode))
        left.failures["decode"] = [(14, "DRAINING")]
        left.release("decode")
        assert ids_of(await asking) == tokens_of(PROMPT, 300, 400)
        (offer,) = (message for kind, message in left.commands if kind == "offer")
        spec = next(message.spec for kind, message in taker.commands if kind == "admit")
        assert len(offer.spans.hashes) == (len(spec.token_ids) - 1) // 64 > (len(PROMPT) - 1) // 64
        assert taker.kinds()[: 3 if is_there else 2] == ["admit", *["fetch"] * is_there, "prefill"]
        assert c.prefill[0].kinds().count("prefill") == 1
        await c.idle()
