"""A held prefill whose prefix comes from another engine: pulled, then only the rest is computed."""

import pytest

from baton.engine.core.request import Key
from tests.support.engine.collector import Collector
from tests.support.engine.handover import copy_kv
from tests.support.engine.toy_engine import engine_request, toy_answer, toy_engine, toy_prompt


def cached_elsewhere(num_tokens: int):
    """An engine that has the first tokens of a prompt in its cache, and the prompt's longer sequel."""
    holder, first = toy_engine(), engine_request("first", toy_prompt(num_tokens))
    collector = Collector()
    holder.submit(first)
    while holder.has_work():
        collector.take(holder.step())
    return holder, engine_request("second", toy_prompt(num_tokens + 70))


def test_only_the_rest_is_computed():
    holder, request = cached_elsewhere(192)
    spans = request.span_hashes[:3]
    offered = holder.admission.offer(Key("offer"), spans)
    engine, collector = toy_engine(), Collector()
    acceptance = engine.admission.accept(request, True)
    assert not engine.scheduler.has_work() and acceptance.num_cached_tokens == 0
    assert engine.ledger.counts()["fetching"] == len(acceptance.blocks)
    engine.admission.begin_fetch(request.key)
    refs = engine.admission.set_aside(request.key, 192)
    assert tuple(refs) == acceptance.blocks[: len(refs)], "the blocks that were leased are those that are filled"
    copy_kv(holder, offered.blocks, engine, refs)
    engine.admission.verify(request.key, 192)
    engine.check_integrity()
    engine.admission.fetch_settled(request.key)
    engine.admission.compute_rest(request.key)
    engine.check_integrity()
    collector.take(engine.step())
    while collector[request.key].first is None:
        collector.take(engine.step())
    first = collector[request.key].first
    assert first.first_tokens[0].token_id == toy_answer(request)[0][0][0]
    assert collector[request.key].progress[0] > 192
    engine.admission.release_lease(request.key)
    engine.step()
    engine.check_integrity()
    assert engine.ledger.counts()["leased"] == 0


@pytest.mark.parametrize("settled_first", (True, False))
def test_cancelled_while_bytes_may_land(settled_first):
    _, request = cached_elsewhere(128)
    engine = toy_engine()
    engine.admission.accept(request, True)
    engine.admission.begin_fetch(request.key)
    if settled_first:
        engine.admission.fetch_settled(request.key)
    engine.cancel(request.key)
    engine.check_integrity()
    assert bool(engine.ledger.counts()["quarantined"]) is not settled_first
    engine.admission.fetch_settled(request.key)
    engine.step()
    engine.check_integrity()
    counts = engine.ledger.counts()
    assert counts["free"] + counts["cached"] == engine.num_blocks
    with pytest.raises(LookupError):
        engine.admission.compute_rest(request.key)
