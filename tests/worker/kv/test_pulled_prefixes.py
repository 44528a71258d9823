"""What a prefill worker says of a prefix that it pulls: final is what its engine goes on behind."""

from types import SimpleNamespace

import pytest

from baton.worker.kv import intake
from tests.support.engine.toy_engine import engine_request, toy_engine

NUM_TOKENS = 192


class WholeFetcher:
    """Brings all that the handle has, in one go."""

    async def fetch(self, handle, ticket, destination, deadline):
        destination.set_aside(NUM_TOKENS)
        destination.verified(NUM_TOKENS)


@pytest.mark.parametrize(
    ("block_size", "num_states", "num_final"), [(64, None, 192), (128, None, 128), (64, 6, 192), (128, 6, 0)]
)
async def test_final_is_what_the_engine_does_not_compute_again(block_size, num_states, num_final, monkeypatch):
    """It does what is a part of a block, and all of it where the state stands inside of one."""
    engine, said = toy_engine(block_size=block_size, num_blocks=16, num_states=num_states), []
    request = engine_request("a", [5 + index % 80 for index in range(NUM_TOKENS + 70)])
    prompt = SimpleNamespace(num_tokens=NUM_TOKENS, span_hashes=request.span_hashes[:3])
    handle = SimpleNamespace(prompt=prompt, source_instance=b"")
    monkeypatch.setattr(intake, "decode_handle", lambda data: handle)
    engine.admission.accept(request, fetches=True)
    counts = dict(num_cached_tokens=0, num_pulled_tokens=0)
    leg = SimpleNamespace(key=request.key, request=request, sources=[(b"", b"")], **counts)
    assert intake.Intake(engine, WholeFetcher()).begin_prefix(leg, lambda *end: None, said.append)
    await leg.fetching
    assert (said, leg.num_cached_tokens) == ([num_final], num_final)
    engine.admission.compute_rest(request.key)
    assert engine.admission.groups[request.key].num_cached_tokens == num_final
    engine.check_integrity()


def test_an_engine_is_asked_once_for_each_block_of_a_long_prompt(monkeypatch):
    """Its ledger is locked meanwhile. A range has four blocks, however many came before; the last is compared again."""
    engine, given = toy_engine(num_blocks=64, max_model_len=1024), []
    request = engine_request("a", [5 + index % 80 for index in range(1000)])
    engine.admission.admit(request)
    refs = engine.ledger.refs
    monkeypatch.setattr(engine.ledger, "refs", lambda block_ids: given.extend(block_ids) or refs(block_ids))
    blocks = intake.EngineBlocks(engine, request.key, 0, lambda token: None)
    for upto_token in (*range(64, 1000, 64), 1000, 640):
        found = blocks.set_aside(upto_token)
    assert tuple(found) == refs(engine.admission.groups[request.key].trunk.blocks.ids)
    assert len(found) == 63 and len(given) == 63 + 15
