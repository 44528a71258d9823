"""Log-probabilities of a prompt's tokens: as transformers has them, and the same bits however the prompt is read."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.engine.core.request import TokenLogprobs
from baton.engine.sampling.sampler import PROMPT_ROWS
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import hand_over
from tests.support.engine.tiny_engine import TINY_VOCAB, load_tiny, tiny_prompt
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import save_tiny

PROMPT = tiny_prompt(150, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), TINY_VOCAB)


def asked(name: str, token_ids=PROMPT, count: int = 3, **options):
    return engine_request(name, token_ids, 4, prompt_logprobs=count, **options)


def read(engine, request) -> tuple[TokenLogprobs, ...]:
    return run_to_end(engine, [request])[request.key].first.prompt_logprobs


@pytest.fixture(scope="module")
def whole(folder):
    return read(load_tiny(folder, max_num_batched_tokens=512), asked("whole"))


def test_logprobs_of_a_prompt_are_those_of_transformers(folder, whole):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0].log_softmax(dim=1)
    assert [entry.chosen[0] for entry in whole] == PROMPT[1:]
    for row, entry in zip(theirs, whole, strict=False):
        ids, values = zip(*entry.top, strict=True)
        assert torch.allclose(row[[entry.chosen[0], *ids]], torch.tensor([entry.chosen[1], *values]), atol=1e-4)
        assert torch.allclose(row.topk(3).values, torch.tensor(values), atol=1e-4)


@pytest.mark.parametrize("chunk", [70, 100])
def test_in_chunks_and_beside_others_as_whole(folder, whole, chunk):
    engine = load_tiny(folder, max_num_batched_tokens=chunk)
    others = [
        engine_request("plain", tiny_prompt(90, 2), 30),
        asked("other", tiny_prompt(90, 3), 1, n=2, temperature=1.0),
    ]
    records = run_to_end(engine, [*others, asked("again")])
    assert len(PROMPT) > PROMPT_ROWS and chunk % PROMPT_ROWS  # of other rows at a time
    assert records[asked("again").key].first.prompt_logprobs == whole
    assert len(records[others[1].key].first.prompt_logprobs) == 89
    assert records[others[0].key].first.prompt_logprobs == ()


def test_what_is_cached_is_read_again(folder, whole):
    engine = load_tiny(folder)
    plain = engine_request("plain", PROMPT, 4)
    run_to_end(engine, [plain])
    records = run_to_end(engine, [request := asked("again")])
    assert records[request.key].first.num_cached_tokens == 0
    assert records[request.key].first.prompt_logprobs == whole
    again = replace(plain, key=plain.key._replace(attempt=1))
    assert run_to_end(engine, [again])[again.key].first.num_cached_tokens == 128  # what was there is there


def test_those_of_a_prompt_that_is_handed_over_are_those_of_the_whole(folder, whole):
    taker = load_tiny(folder)
    run_to_end(taker, [engine_request("plain", PROMPT, 4)])
    firsts, _ = hand_over(load_tiny(folder, max_num_batched_tokens=100), taker, [request := asked("held")])
    assert firsts[request.key].first.prompt_logprobs == whole


def test_a_prompt_that_was_preempted_is_read_on_to_the_same_end(folder, whole):
    engine = load_tiny(folder, max_num_batched_tokens=70)
    engine.submit(request := asked("preempted"))
    engine.submit(engine_request("beside", PROMPT, 4))  # names the same units, and may be ahead
    engine.step()
    (group,) = (group for group in engine.lifecycle.groups.values() if group.key == request.key)
    assert 0 < group.trunk.num_computed < len(PROMPT)
    engine.scheduler.preempt(group.trunk)
    assert run_to_end(engine)[request.key].first.prompt_logprobs == whole


def test_those_of_an_answer_read_as_a_prompt_are_those_it_was_written_with(folder):
    request = engine_request("a", PROMPT, 40, logprobs=2)
    record = run_to_end(load_tiny(folder), [request])[request.key]
    longer = asked("b", [*PROMPT, *record.tokens[0]], 2)
    assert list(read(load_tiny(folder), longer)[-40:]) == record.logprobs[0]


def test_one_token_has_none(folder):
    assert read(load_tiny(folder), asked("one", [5])) == ()


def test_only_the_prompt_of_a_sequence_that_moved_here(folder, whole):
    moved = asked("moved", [*PROMPT, *tiny_prompt(20, 9)], num_prompt_tokens=len(PROMPT))
    moved = replace(moved, max_tokens=30)
    records = run_to_end(load_tiny(folder, max_num_batched_tokens=100), [moved], Collector(first_index=20))
    assert records[moved.key].first.prompt_logprobs == whole


def test_no_part_of_it_may_have_been_fetched(folder):
    engine, request = load_tiny(folder), asked("fetched")
    engine.admission.admit(request)
    engine.admission.set_aside(request.key, 64)
    engine.admission.verify(request.key, 64)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        engine.admission.compute_rest(request.key)
