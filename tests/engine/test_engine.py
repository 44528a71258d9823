"""The engine on a real (small, random) model: batched, chunked, from the cache, preempted and handed over, bit for bit
as alone, and as transformers has it."""

import random
import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.ranks.spawn import OwnMemory
from baton.engine.start_line import start_details, start_line
from kvtransfer.layout import NumericsClass
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.serving import submit
from tests.support.engine.tiny_engine import TINY_VOCAB, load_tiny, tiny_prompt
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), TINY_VOCAB)


@pytest.fixture(scope="module")
def alone(folder):
    """The answer of a request with an engine to itself, as records: computed once per request."""
    answers = {}

    def answer(request):
        if request.key not in answers:
            answers[request.key] = run_to_end(load_tiny(folder, max_num_batched_tokens=512), [request])[request.key]
        return answers[request.key]

    return answer


def mix(longer: int = 0) -> list:
    """Greedy and seeded, short and long, some with a prefix in common, with logprobs and penalties."""
    shared = tiny_prompt(140, 0)
    sampled = dict(temperature=0.9, top_k=50, top_p=0.95)
    return [
        engine_request("greedy", tiny_prompt(70, 1), 60 + longer, logprobs=3),
        engine_request("short", tiny_prompt(3, 2), 90 + longer, logprobs=0),
        engine_request("shared", shared + tiny_prompt(20, 3), 50 + longer, logprobs=2),
        engine_request("sampled", shared + tiny_prompt(31, 4), 60 + longer, seed=7, **sampled),
        engine_request("choices", shared[:100], 40 + longer, n=3, seed=8, logprobs=1, **sampled),
        engine_request("repeated", tiny_prompt(90, 5), 60 + longer, seed=9, repetition_penalty=1.3, **sampled),
        engine_request("present", tiny_prompt(20, 7), 30 + longer, seed=10, presence_penalty=0.4, **sampled),
        engine_request(
            "frequent", tiny_prompt(64, 6), 60 + longer, frequency_penalty=0.7, logit_bias=((5, 2.0), (9, -3.0))
        ),
    ]


def check_as_alone(records: Collector, requests, alone) -> None:
    for request in requests:
        record, expected = records[request.key], alone(request)
        assert not record.ended.error
        assert record.answer() == expected.answer(), request.key
        assert record.logprobs == expected.logprobs, f"{request.key}: logprobs differ in their bits"


def submit_all(engine: Engine, requests, chance: random.Random | None = None) -> Collector:
    """Submits as the engine takes them, a few steps apart where a chance is given."""
    records = Collector()
    for request in requests:
        submit(engine, request, records)
        for _ in range(chance.randint(0, 12) if chance else 0):
            records.take(engine.step())
    return run_to_end(engine, collector=records)


@pytest.mark.parametrize("dtype, block_size", [("fp32", 16), ("fp32", 128), ("bf16", 16), ("bf16", 32)])
def test_batched_and_chunked_as_alone(folder, dtype, block_size):
    requests = mix()
    options = dict(dtype=dtype, block_size=block_size, num_blocks=2048 // block_size)
    singles = {
        request.key: run_to_end(load_tiny(folder, max_num_batched_tokens=512, **options), [request])
        for request in requests
    }
    for chunk in (70, 150):
        engine = load_tiny(folder, max_num_batched_tokens=chunk, **options)
        records = submit_all(engine, requests, random.Random(chunk))
        check_as_alone(records, requests, lambda request: singles[request.key][request.key])
        assert engine.ledger.num_available == engine.num_blocks


def test_preempted_and_back_as_alone(folder, alone):
    requests = [replace(request, key=request.key._replace(attempt=9)) for request in mix(longer=90)]
    engine = load_tiny(folder, num_blocks=40, max_num_batched_tokens=100)
    records = submit_all(engine, requests)
    assert sum(records[request.key].ended.report.num_preemptions for request in requests) > 2
    check_as_alone(records, requests, alone)


def test_from_the_cache_as_alone(folder, alone):
    requests = mix()
    engine = load_tiny(folder, num_blocks=512)
    submit_all(engine, requests)
    again = [replace(request, key=request.key._replace(attempt=1)) for request in requests]
    records = submit_all(engine, again)
    for request, second in zip(requests, again, strict=True):
        assert records[second.key].first.num_cached_tokens == (len(request.token_ids) - 1) // 64 * 64
        assert records[second.key].answer() == alone(request).answer()
        assert records[second.key].logprobs == alone(request).logprobs


def test_the_next_turn_from_decoded_kv_as_from_scratch(folder):
    """KV that was decoded feeds the next turn's prefill: the same bits as reading it all."""
    engine = load_tiny(folder)
    first = engine_request("a", tiny_prompt(100, 1), 120)
    answer = run_to_end(engine, [first])[first.key].answer()[0][0]
    second = engine_request("b", [*first.token_ids, *answer, *tiny_prompt(10, 2)], 40, logprobs=2)
    warm, cold = run_to_end(engine, [second])[second.key], run_to_end(load_tiny(folder), [second])[second.key]
    assert warm.first.num_cached_tokens == 192 and cold.first.num_cached_tokens == 0
    assert warm.answer() == cold.answer() and warm.logprobs == cold.logprobs


def test_handed_over_as_alone(folder, alone):
    requests = mix()
    firsts, rest = hand_over(load_tiny(folder, max_num_batched_tokens=100), load_tiny(folder, num_blocks=80), requests)
    for request in requests:
        check_handed_over(firsts, rest, request, alone(request))


def test_greedy_as_transformers(folder, alone):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request in mix():
        if request.key.request_id in ("greedy", "short", "shared"):
            ids = torch.tensor([request.token_ids])
            with torch.no_grad():
                mask = torch.ones_like(ids)
                whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=request.max_tokens)
            assert alone(request).tokens[0] == whole[0, len(request.token_ids) :].tolist()


def test_load_says_what_it_chose(folder):
    engine = load_tiny(folder, dtype="auto", num_blocks=None, max_num_seqs=4)
    assert engine.config.dtype == engine.config.kv_dtype == "fp32"
    assert engine.config.max_model_len == 512 and engine.num_blocks == 4 * 32
    assert re.search(r"; attention \w+, linear \w+, layers \w+$", start_line(engine)) and len(start_line(engine)) < 300
    kinds = [re.match(r"(\w+) \w+: not \w+: .+", line)[1] for line in start_details(engine)]
    assert kinds == ["attention", "linear", "layers"]
    assert "128 blocks of 16 tokens" in start_line(engine) and "\n" not in start_line(engine)
    assert NumericsClass.parse(str(engine.numerics_class)).compute == "fp32"
    assert str(load_tiny(folder).numerics_class) == str(engine.numerics_class)
    assert str(load_tiny(folder, dtype="bf16").numerics_class) != str(engine.numerics_class)
    assert len(engine.model_identity) == 32


def test_the_pool_lies_in_memory_that_is_given(folder):
    given = []

    def memory_for(num_bytes: int) -> OwnMemory:
        given.append(OwnMemory(num_bytes))
        return given[0]

    config = EngineConfig(model=folder, block_size=16, num_blocks=32, max_num_seqs=2, threads=1)
    engine = Engine.load(config, memory_for)
    assert len(given[0].memory) == 32 * engine.layout.block_bytes
    run_to_end(engine, [engine_request("a", tiny_prompt(50, 1), 4)])
    assert any(given[0].memory)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(block_size=24), "block_size 24"),
        (dict(dtype="int3"), "dtype 'int3'"),
        (dict(num_blocks=0), "num_blocks 0"),
        (
            dict(max_num_seqs=64, max_num_batched_tokens=100),
            "max_num_batched_tokens 100: must be at least max_num_seqs",
        ),
        (dict(max_model_len=4096), "max_model_len 4096: the model's context is 512"),
        (dict(max_model_len=512, num_blocks=4), "num_blocks 4: one context of 512 needs 32"),
        (dict(attention="none"), "attention backend 'none'"),
    ],
)
def test_options_that_do_not_fit_are_one_line(folder, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_tiny(folder, **options)
    assert "\n" not in str(error.value)


def test_a_small_pool_shortens_the_context(folder):
    assert load_tiny(folder, num_blocks=8).config.max_model_len == 128


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        load_tiny(tmp_path / "nowhere")
