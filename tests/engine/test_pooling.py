"""Embeddings: as transformers has them, the same bits alone, in chunks and beside others, and nothing of them stays."""

import pytest
import torch
from transformers import AutoModel, LlamaForCausalLM

from baton.engine.core.model_errors import ModelError
from baton.engine.core.pooling import Pooling, PoolingParams
from tests.support.engine.collector import run_to_end
from tests.support.engine.tiny_engine import TINY_VOCAB, load_tiny, tiny_prompt
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import make_folder, save_tiny

PROMPTS = {"long": tiny_prompt(150, 1), "short": tiny_prompt(5, 2), "one": [7], "spans": tiny_prompt(128, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), TINY_VOCAB)


def asked(name: str, pooling: Pooling = Pooling.LAST, normalize: bool = False, dimensions: int = 0):
    return request_for(PROMPTS[name], pooling, normalize, dimensions)


def request_for(token_ids: list[int], pooling: Pooling, normalize: bool = False, dimensions: int = 0):
    params = PoolingParams(pooling, normalize, dimensions)
    return engine_request(f"{len(token_ids)} {pooling.name}", token_ids, 0, named=False, pooling=params)


def embed(engine, *requests) -> list[tuple[float, ...]]:
    records = run_to_end(engine, requests)
    assert all(records[request.key].first.first_tokens == () for request in requests)
    assert not any(records[request.key].ended.error for request in requests)
    return [records[request.key].first.pooled for request in requests]


def close(values, rows: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(values), rows, atol=1e-4)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma2", "mixtral"])
def test_pooled_rows_are_those_of_transformers(family, tmp_path):
    make_folder(tmp_path, family)
    theirs = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine = load_tiny(tmp_path, max_num_batched_tokens=512)
    for token_ids in PROMPTS.values():
        token_ids = [token_id % theirs.config.vocab_size for token_id in token_ids]
        with torch.inference_mode():
            rows = theirs(torch.tensor([token_ids])).last_hidden_state[0]
        last, mean, first = embed(engine, *(request_for(token_ids, pooling) for pooling in Pooling))
        assert close(last, rows[-1]) and close(mean, rows.mean(dim=0)) and close(first, rows[0])


def test_a_folder_that_was_saved_without_its_head(tmp_path):
    """As Qwen3-Embedding's: no tensor begins with "model."."""
    make_folder(tmp_path / "whole", "qwen3-tied")
    theirs = AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    theirs.config.architectures = ["Qwen3ForCausalLM"]
    theirs.save_pretrained(tmp_path / "bare")
    config = tmp_path / "bare" / "config.json"
    config.write_text(config.read_text().replace('"Qwen3Model"', '"Qwen3ForCausalLM"'))
    requests = [request_for([5, 6, 7] * 9, pooling) for pooling in Pooling]
    assert embed(load_tiny(tmp_path / "bare"), *requests) == embed(load_tiny(tmp_path / "whole"), *requests)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_folder_without_a_head_that_is_not_tied(tmp_path, quantization):
    """As Qwen3-VL-Embedding's: what is wrong is said, with what serves its embeddings."""
    make_folder(tmp_path, "qwen3")
    requests = [request_for([5, 6, 7] * 9, pooling) for pooling in Pooling]
    whole = embed(load_tiny(tmp_path, quantization=quantization), *requests)
    quantized_folders.change_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    told = "tensor lm_head.weight is missing: the model has no output head; to serve .* set tie_word_embeddings"
    with pytest.raises(ModelError, match=told) as error:
        load_tiny(tmp_path, quantization=quantization)
    assert "\n" not in str(error.value)
    quantized_folders.change_config(tmp_path, tie_word_embeddings=True)
    assert embed(load_tiny(tmp_path, quantization=quantization), *requests) == whole


def test_labels_as_transformers_and_in_chunks(folder):
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params = PoolingParams(label_token_ids=(9, 200, 5))
    requests = [engine_request(name, ids, 0, named=False, pooling=params) for name, ids in PROMPTS.items()]
    whole = [embed(load_tiny(folder, max_num_batched_tokens=512), request)[0] for request in requests]
    assert embed(load_tiny(folder, max_num_batched_tokens=70), *requests) == whole
    for token_ids, ours in zip(PROMPTS.values(), whole, strict=True):
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([token_ids])).logits[0, -1].log_softmax(dim=0)
        assert close(ours, logprobs[[9, 200, 5]])


@pytest.fixture(scope="module")
def alone(folder):
    found = {}
    for name in PROMPTS:
        for pooling in Pooling:
            (found[name, pooling],) = embed(load_tiny(folder, max_num_batched_tokens=512), asked(name, pooling))
    return found


@pytest.mark.parametrize("chunk", [70, 100])
def test_in_chunks_and_beside_others_as_alone(folder, alone, chunk):
    engine = load_tiny(folder, max_num_batched_tokens=chunk)
    engine.submit(engine_request("written", tiny_prompt(40, 9), 30))
    for pooling in Pooling:
        keys = [(name, pooling) for name in PROMPTS]
        assert embed(engine, *(asked(*key) for key in keys)) == [alone[key] for key in keys]


def test_length_and_dimensions(folder, alone):
    whole = torch.tensor(alone["long", Pooling.MEAN])
    (one,), (part,) = (embed(load_tiny(folder), asked("long", Pooling.MEAN, True, dimensions)) for dimensions in (0, 8))
    assert torch.allclose(torch.tensor(one), whole / whole.norm(), atol=1e-6)
    assert len(part) == 8 and torch.allclose(torch.tensor(part), whole[:8] / whole[:8].norm(), atol=1e-6)


def test_nothing_of_it_stays(folder):
    engine = load_tiny(folder)
    embed(engine, asked("long"))
    assert engine.ledger.counts()["free"] == engine.num_blocks and not engine.ledger.snapshot()


def test_what_is_cached_is_read_again(folder, alone):
    engine = load_tiny(folder)
    run_to_end(engine, [engine_request("plain", PROMPTS["long"], 4)])
    for pooling in Pooling:
        assert embed(engine, asked("long", pooling)) == [alone["long", pooling]]


def test_one_that_was_preempted_is_read_again(folder, alone):
    engine = load_tiny(folder, max_num_batched_tokens=70)
    engine.submit(request := asked("long", Pooling.MEAN))
    engine.step()
    (group,) = engine.lifecycle.groups.values()
    assert 0 < group.trunk.num_computed < 150
    engine.scheduler.preempt(group.trunk)
    assert run_to_end(engine)[request.key].first.pooled == alone["long", Pooling.MEAN]


def test_cancelled_in_the_middle(folder):
    engine = load_tiny(folder, max_num_batched_tokens=70)
    engine.submit(request := asked("long"))
    engine.step()
    engine.cancel(request.key)
    assert run_to_end(engine)[request.key].ended.error == "cancelled"
    assert engine.ledger.counts()["free"] == engine.num_blocks
