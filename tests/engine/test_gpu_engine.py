"""A whole engine on a GPU against one on the CPU."""

import pytest
import torch

from baton.engine.core.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.start_line import start_line
from tests.support import bare_engine
from tests.support.model_folders.families import make_folder, random_ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
SAMPLED = dict(temperature=0.8, seed=7)


def load(folder, device: str, **options) -> Engine:
    defaults = dict(num_blocks=64, max_num_seqs=8, max_model_len=256, max_num_batched_tokens=128)
    return Engine.load(EngineConfig(folder, device=device, **(defaults | options)))


def answers(engine: Engine, prompts, together: bool, **sampling) -> list[list[int]]:
    requests = [bare_engine.bare_request(str(i), ids, max_tokens=24, **sampling) for i, ids in enumerate(prompts)]
    found: dict = {}
    for batch in [requests] if together else [[request] for request in requests]:
        found |= bare_engine.serve_alone(engine, batch)
    engine.check_integrity()
    return [found[request.key.request_id][0].token_ids for request in requests]


@pytest.mark.parametrize("sampling", [{}, SAMPLED, SAMPLED | dict(top_p=0.9, presence_penalty=0.3)], ids=str)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_tokens_of_the_cpu(tmp_path, family, sampling):
    """fp32: the kernels add in other orders, the tokens are the same."""
    make_folder(tmp_path, family)
    prompts = [random_ids(length, length) for length in (5, 40, 150)]
    wanted = answers(load(tmp_path, "cpu"), prompts, True, **sampling)
    assert answers(load(tmp_path, "cuda"), prompts, True, **sampling) == wanted


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4", "fp8_e4m3"])
def test_exact_answers_do_not_depend_on_the_batch(tmp_path, kv_dtype):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64)
    engine = load(tmp_path, "cuda", dtype="bf16", kv_dtype=kv_dtype)
    assert engine.runner.launcher.num_graphs > 0
    prompts = [random_ids(length, length) for length in (3, 17, 64, 65, 120, 200)]
    assert answers(engine, prompts, True, **SAMPLED) == answers(engine, prompts, False, **SAMPLED)


def test_graphs_change_nothing(tmp_path):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64)
    prompts = [random_ids(length, length) for length in (3, 17, 64)]
    eager, graphs = (load(tmp_path, "cuda", cuda_graphs=on) for on in (False, True))
    assert eager.runner.launcher.num_graphs == 0
    assert answers(eager, prompts, True) == answers(graphs, prompts, True)


@pytest.mark.parametrize("sampling", [{}, SAMPLED, SAMPLED | dict(top_p=0.9)], ids=str)
def test_steps_in_flight_change_nothing(tmp_path, sampling):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64)
    prompts = [random_ids(length, length) for length in (3, 17, 64, 65)]
    engine = load(tmp_path, "cuda")
    assert engine.runner.launcher.overlaps
    found = answers(engine, prompts, True, **sampling)
    engine.runner.launcher.overlaps = False
    assert answers(engine, prompts, True, **sampling) == found


def test_a_share_of_the_multiprocessors_changes_nothing(tmp_path):
    make_folder(tmp_path, "llama3", torch.bfloat16, head_dim=64)
    prompts = [random_ids(length, length) for length in (3, 17, 64)]
    try:
        shared = load(tmp_path, "cuda", sm_share=0.5)
    except ValueError as error:
        pytest.skip(str(error))
    assert "multiprocessors" in start_line(shared)
    assert answers(shared, prompts, True) == answers(load(tmp_path, "cuda"), prompts, True)


@pytest.mark.parametrize("num_draft_tokens", [None, 3])
def test_speculation_changes_nothing(tmp_path, num_draft_tokens):
    make_folder(tmp_path, "llama3")
    prompts = [random_ids(10, seed) * 4 for seed in range(3)]
    plain = answers(load(tmp_path, "cuda"), prompts, True)
    speculated = load(tmp_path, "cuda", speculator="ngram", num_draft_tokens=num_draft_tokens)
    assert answers(speculated, prompts, True) == plain


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "fp8", "int4-g32"])
def test_a_quantized_model_answers_alike_with_and_without_graphs(tmp_path, quantization):
    make_folder(tmp_path, "llama3", torch.bfloat16, hidden_size=64, intermediate_size=128, head_dim=64)
    engine = load(tmp_path, "cuda", quantization=quantization)
    prompts = [random_ids(30, seed) for seed in range(4)]
    assert answers(engine, prompts, True) == answers(engine, prompts, False)


def test_pool_by_share_and_out_of_memory(tmp_path):
    make_folder(tmp_path, "llama3")
    engine = load(tmp_path, "cuda", num_blocks=None, gpu_memory_utilization=0.3)
    total = torch.cuda.mem_get_info()[1]
    assert 0.1 * total < engine.pool.bytes.nbytes < 0.3 * total
    with pytest.raises(ValueError, match="GPU") as error:
        load(tmp_path, "cuda", num_blocks=None, gpu_memory_utilization=1e-5)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="out of GPU memory") as error:
        load(tmp_path, "cuda", num_blocks=1 << 30)
    assert "\n" not in str(error.value)
