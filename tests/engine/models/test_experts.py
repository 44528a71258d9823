"""A mixture of experts: who is chosen, what is read, and what is refused; parity is in test_parity_models.py."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.models.loader import load_model
from tests.support.engine.collector import run_to_end
from tests.support.engine.manual_batch import ManualBatch
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import make_folder, random_ids

IDS = random_ids(40, 3)


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "model", "qwen3-moe", hidden_size=64)
    return tmp_path / "model"


def experts_of(folder, **options):
    return load_model(EngineConfig(folder, **options)).layers[1].experts


def test_equal_scores_are_ranked_by_index(folder):
    experts = experts_of(folder)
    chosen, weights = experts.choose(torch.tensor([[1.0, 3, 3, 1, 3, 3, 0, 0], [0.0] * 8]))
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_the_router_is_fp32_in_a_bf16_model(folder):
    experts = experts_of(folder, dtype="bf16")
    assert experts.router(torch.zeros(1, 64)).dtype == torch.float32


def test_only_chosen_experts_are_read(folder):
    """One row reads three of eight, and a row is the same bits alone as among others."""
    experts, used = experts_of(folder), []
    for index, kernel in enumerate(experts.gate_up):
        experts.gate_up[index] = lambda x, index=index, kernel=kernel: used.append(index) or kernel(x)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = experts(x)
        used.clear()
        alone = experts(x[4:5])
        chosen, _ = experts.choose(experts.router(x[4:5]))
    assert sorted(used) == sorted(chosen[0].tolist()) and len(used) == 3
    assert torch.equal(alone[0], together[4])


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-moe"])
def test_threads_share_the_rows(tmp_path, name):
    """Of a prompt and of decode: with the bits that one thread gives."""
    make_folder(tmp_path / "model", name, hidden_size=512)
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            engine = Engine.load(EngineConfig(tmp_path / "model", threads=threads, num_blocks=32, dtype="fp32"))
            assert engine.runner.model.layers_name == "fused"
            request = engine_request("a", random_ids(90, 4), 8, named=False, logprobs=1)
            found.append(run_to_end(engine, [request])[request.key].logprobs)
    finally:
        torch.set_num_threads(num_threads)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "granite-moe", "gpt-oss"])
@pytest.mark.parametrize("quantization", ["int8-weight-only", "int4-g32"])
def test_rounded_as_they_are_read(tmp_path, name, quantization):
    """Near to the float model, whose experts they are."""
    sizes = dict(hidden_size=64, num_hidden_layers=1)
    sizes |= {"qwen2-moe": dict(moe_intermediate_size=96, shared_expert_intermediate_size=64)}.get(name, {})
    sizes |= {"gpt-oss": dict(layer_types=["full_attention"])}.get(name, {})
    make_folder(tmp_path, name, intermediate_size=96, **sizes)
    logits = [
        ManualBatch(load_model(EngineConfig(tmp_path, quantization=way))).step({"a": IDS})["a"]
        for way in ("auto", quantization)
    ]
    error = (logits[1] - logits[0]).square().mean() / logits[0].square().mean()
    assert 0 < error < (1e-3 if quantization.startswith("int8") else 0.1)


def refused(folder) -> str:
    with pytest.raises(ModelError) as error:
        load_model(EngineConfig(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


def change(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("part", ["experts.5.down_proj.weight", "gate.weight"])
def test_missing_experts_and_router(folder, part):
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.1.mlp.{part}"]
    save_file(tensors, folder / "model.safetensors")
    assert f"tensor model.layers.1.mlp.{part} is missing" in refused(folder)


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt-oss", "granite-moe", "llama4", "nemotron-3", "qwen3-next", "deepseek-v2"]
)
def test_an_unknown_router(tmp_path, name):
    make_folder(tmp_path, name)
    change(tmp_path, scoring_func="tanh")
    assert f"{tmp_path}/config.json: scoring_func 'tanh' is not supported" in refused(tmp_path)


def test_a_config_with_another_number_of_experts(folder):
    change(folder, num_experts=4, num_local_experts=4)
    assert "mlp.gate.weight has shape [8, 64], config.json asks for [4, 64]" in refused(folder)


def test_a_layer_that_is_dense_in_the_config_alone(folder):
    change(folder, mlp_only_layers=[0, 1])
    assert "model.layers.1.mlp.gate_proj.weight is missing" in refused(folder)


def test_more_chosen_than_there_are(folder):
    change(folder, num_experts_per_tok=9)
    assert "num_experts_per_tok 9: there are 8 experts" in refused(folder)


@pytest.fixture
def deepseek(tmp_path):
    make_folder(tmp_path / "model", "deepseek-v3")
    return tmp_path / "model"


def test_groups_are_ranked_by_their_best_two(deepseek):
    """And their experts are weighed without what was added to choose them; of equal ones the first is taken."""
    experts = experts_of(deepseek)
    experts.correction = torch.tensor([0.0, 0, 0, 0, 0, 0, 1.5, 0])
    scores = torch.tensor([[3.0, -3, 1, 1, 1, 1, -2, -2]])
    chosen, weights = experts.choose(scores)
    shares = scores.sigmoid()[0]
    assert chosen.tolist() == [[6, 2, 3]]  # sums of two: 1, 1.46, 1.46, 1.74: the second group and the fourth
    kept = shares[chosen[0]]
    torch.testing.assert_close(weights[0], kept / kept.sum() * 2.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_group=3), "n_group 3 with topk_group 2: 8 experts are not parted so"),
        (dict(topk_group=5), "n_group 4 with topk_group 5: 8 experts are not parted so"),
        (dict(topk_group=1), "num_experts_per_tok 3: 1 of 4 groups hold 2"),
        (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
        (dict(topk_method="greedy"), "topk_method 'greedy' is not supported"),
        (dict(kv_lora_rank=None), "kv_lora_rank is missing"),
        (dict(qk_rope_head_dim=7), "kv_lora_rank 24 and qk_rope_head_dim 7 are not both even"),
        (dict(kv_lora_rank=22), "kv_a_proj_with_mqa.weight has shape [32, 48], config.json asks for [30, 48]"),
    ],
    ids=str,
)
def test_a_deepseek_config_that_cannot_be(deepseek, changes, message):
    change(deepseek, **changes)
    assert message in refused(deepseek)


def test_a_router_is_read_as_it_is_stored(deepseek):
    """As transformers does in a bf16 model: the corrections differ by less than bf16 tells of numbers so large."""
    path, gate = deepseek / "model.safetensors", "model.layers.1.mlp.gate"
    tensors = load_file(path)
    correction = tensors[f"{gate}.e_score_correction_bias"] = 8 + 0.01 * torch.arange(8)
    save_file(tensors, path)
    experts = experts_of(deepseek, dtype="bf16")
    assert torch.equal(experts.correction, correction)
    assert torch.equal(experts.router(torch.eye(48)).t(), tensors[f"{gate}.weight"])


def test_a_missing_correction(deepseek):
    tensors = load_file(deepseek / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(tensors, deepseek / "model.safetensors")
    assert "tensor model.layers.1.mlp.gate.e_score_correction_bias is missing" in refused(deepseek)


def test_layers_that_predict_further_tokens_are_left(deepseek):
    """Behind as many as config.json says; one more is refused."""
    tensors = load_file(deepseek / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, deepseek / "model.safetensors")
    change(deepseek, num_nextn_predict_layers=0)
    assert "model.layers.2.eh_proj.weight has no place" in refused(deepseek)
    change(deepseek, num_nextn_predict_layers=1)
    load_model(EngineConfig(deepseek))


def test_a_tensor_that_the_config_does_not_describe(tmp_path):
    make_folder(tmp_path, "llama-mqa-bias")
    change(tmp_path, attention_bias=False)
    message = refused(tmp_path)
    assert "self_attn." in message and "bias has no place in the model that config.json describes" in message


@pytest.mark.parametrize(
    ("architecture", "keys", "nearest", "missing"),
    [
        ("DeepseekV4ForCausalLM", dict(n_routed_experts=256, compress_ratios=[4]), "DeepseekV", "compressed keys"),
        ("GptOss2ForCausalLM", dict(num_local_experts=32, swiglu_limit=7.0), "GptOssFor", "clamped SwiGLU"),
        ("Gemma3nForCausalLM", dict(vision_config={"a": 1}), "Gemma3ForCausalLM", "a vision encoder"),
        ("Qwen3_6MoeForCausalLM", dict(num_experts=8, linear_num_key_heads=4), "Qwen3_5Moe", "linear attention"),
        ("Phi4ForCausalLM", {}, "Phi3ForCausalLM", "its layers are not described here"),
    ],
)
def test_a_family_that_is_not_served_names_the_nearest(folder, architecture, keys, nearest, missing):
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": [architecture], "num_hidden_layers": 2} | keys))
    message = refused(folder)
    assert architecture in message and missing in message
    assert nearest in message.split("the nearest that is: ")[1].split(";")[0]
