"""A prefix that another worker holds is asked for, and the prompt is computed where it does not come."""

import asyncio

import pytest

from gateway import prefix_source
from gateway.rates import Rates
from tests.gateway.test_answers import PROMPT, generate, ids_of

MAX_TOKENS = 4
NUM_PREFIX = 256  # whole spans of the prompt with something left to compute


async def known(c, holder) -> None:
    """Until the index has heard what the worker holds."""
    hashes = c.gateway.names.spans("default", PROMPT[:NUM_PREFIX]).hashes
    async with asyncio.timeout(10):
        while not any(worker.startswith(holder.instance) for worker in await c.gateway.index.lookup(hashes)):
            await asyncio.sleep(0.01)


async def read_elsewhere(c, before=lambda holder, reader: None):
    """Has one prefill worker read the prompt and asks again when only the other one has room; the answer, the Prefill
    that the other one got, and the Offers that were made."""
    for link in c.gateway.registry.links:
        link.hello.kv_token_bytes = 1
    c.gateway.registry.candidates._said.clear()
    first = await generate(c, max_tokens=MAX_TOKENS)
    await c.idle()
    for link in c.gateway.registry.links:
        link.rates = Rates()  # a fake reads so fast that nothing would be pulled
    holder, reader = sorted(c.prefill, key=lambda worker: "prefill" not in worker.kinds())
    assert "prefill" not in reader.kinds()
    await known(c, holder)
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


async def test_what_is_cheap_is_computed(cluster):
    async with cluster(num_prefill=2) as c:
        _, prefill, offers = await read_elsewhere(
            c, lambda *_: [link.note_prefill(128, 1e-4) for link in c.gateway.registry.links]
        )
        assert not offers and not prefill.sources
        await c.idle()
