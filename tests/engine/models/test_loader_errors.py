"""A model folder that cannot be served ends with one line that names the file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model, model_identity
from baton.engine.models.registry import read_spec
from tests.support.model_folders.families import make_folder


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path / "model", "qwen3")
    return tmp_path / "model"


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def assert_refused(folder, *parts: str):
    with pytest.raises(ModelError) as error:
        load_model(EngineConfig(folder))
    message = str(error.value)
    assert "\n" not in message
    for part in (str(folder), *parts):
        assert part in message, message


def test_missing_folder(tmp_path):
    assert_refused(tmp_path / "nowhere", "no such model folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(folder, name):
    (folder / name).unlink()
    assert_refused(folder, name, "no such file")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x80"])
def test_config_is_not_json(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(folder, "config.json")


@pytest.mark.parametrize("keep", [0, 5, 100, -10])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(folder, "model.safetensors", "truncated or not a safetensors file")


def test_weights_of_another_format(folder):
    torch.save({"a": torch.zeros(3)}, folder / "model.safetensors")
    assert_refused(folder, "model.safetensors", "truncated or not a safetensors file")


def test_unknown_architecture(folder):
    change_config(folder, architectures=["MambaForCausalLM"], state_size=16)
    assert_refused(
        folder, "config.json", "MambaForCausalLM", "is not supported; the nearest that is", "state-space layers"
    )


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_config_lacks_a_size(folder, key):
    change_config(folder, **{key: None})
    assert_refused(folder, "config.json", f"{key} is missing")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"num_key_value_heads": 3},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "spiral"}},
        {"rope_parameters": {"rope_type": "linear"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"dtype": "float64"},
        {"layer_types": ["full_attention"], "use_sliding_window": True, "sliding_window": 8},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_config_that_cannot_be(folder, changes):
    change_config(folder, **changes)
    assert_refused(folder, "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("qwen3", {"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM', not a list"),
        ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        ("qwen3", {"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ("qwen3", {"rope_parameters": 5}, "rope_parameters is 5, not an object"),
        ("qwen3", {"rope_parameters": {}, "rope_scaling": [8]}, "rope_scaling is [8], not an object"),
        (
            "qwen2-window",
            {"max_window_layers": "1", "layer_types": None},
            "max_window_layers is '1', not a whole number",
        ),
        ("gemma3", {"layer_types": 2}, "layer_types is 2, not a list"),
        ("qwen3-moe", {"mlp_only_layers": 0}, "mlp_only_layers is 0, not a list"),
        ("deepseek-v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace is '1', not a whole number"),
        ("nemotron-h", {"layers_block_type": ["mlp"] * 4}, "layers_block_type has neither mamba nor attention"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_named(tmp_path, name, changes, told):
    """A flag of "false" was taken for true; the others were told in Python's words, without the key."""
    make_folder(tmp_path, name)
    change_config(tmp_path, **changes)
    assert_refused(tmp_path, "config.json: ", told)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config {'1': {'head_dim': 64}} is not supported"),
    ],
    ids=["is_causal", "per_layer_config"],
)
def test_what_transformers_takes_of_every_family(tmp_path, name, changes, told):
    """Attention both ways (gte-Qwen2), and layers that differ from what the config says of all."""
    make_folder(tmp_path, name)
    change_config(tmp_path, is_causal=True, per_layer_config={})
    read_spec(tmp_path)
    change_config(tmp_path, **changes)
    assert_refused(tmp_path, "config.json", told)


@pytest.mark.parametrize(("value", "is_tuned"), [(4, True), (True, True), (0, False), (False, False), (None, True)])
def test_a_number_that_means_true(tmp_path, value, is_tuned):
    """Of Llama 4 transformers 4.51 wrote how it scales queries as 4."""
    make_folder(tmp_path, "llama4")
    change_config(tmp_path, attn_temperature_tuning=value)
    assert (read_spec(tmp_path).temperature is not None) == is_tuned
    change_config(tmp_path, attn_temperature_tuning="4")
    assert_refused(tmp_path, "config.json", "attn_temperature_tuning is '4', not true or false")


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"sliding_attention": {"rope_type": "default"}, "full_attention": {"rope_type": "default"}},
    ],
    ids=["one", "by-type"],
)
def test_scaling_beside_other_rope_parameters(tmp_path, parameters):
    """Which transformers takes: model cards tell to add it to files that have `rope_parameters` by now."""
    make_folder(tmp_path, "llama3" if "rope_type" in parameters else "gemma3")
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    change_config(tmp_path, rope_parameters=parameters, rope_scaling=scaling)
    assert_refused(tmp_path, "config.json", "rope_scaling differs from rope_parameters; put what is meant into")
    inner = parameters.get("full_attention", parameters)
    inner |= scaling | {"rope_type": "yarn"}
    del inner["type"]
    change_config(tmp_path, rope_parameters=parameters)
    assert read_spec(tmp_path).ropes[0].kind == "yarn"


def test_missing_tensor(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    assert_refused(folder, "model.safetensors", "tensor model.layers.1.mlp.up_proj.weight is missing")


def test_wrong_shape(folder):
    change_config(folder, intermediate_size=101)
    assert_refused(folder, "model.safetensors", "mlp.gate_proj.weight has shape [100, 48]", "asks for [101, 48]")


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_head_of_its_own_beside_tied_embeddings(tmp_path, quantization):
    """Some files have the table twice; transformers ties two that are equal, and no others."""
    reference = make_folder(tmp_path, "llama3")
    change_config(tmp_path, tie_word_embeddings=True)
    told = "lm_head.weight differs from model.embed_tokens.weight, and config.json has tie_word_embeddings true"
    with pytest.raises(ModelError, match=told):
        load_model(EngineConfig(tmp_path, quantization=quantization))
    tensors = reference.state_dict()
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, tmp_path / "model.safetensors")
    load_model(EngineConfig(tmp_path, quantization=quantization))


def test_weights_that_are_no_numbers(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, path)
    assert_refused(folder, "model.safetensors", "model.norm.weight is torch.int8")


def test_missing_shard(tmp_path):
    folder = tmp_path / "sharded"
    make_folder(tmp_path / "single", "qwen3").save_pretrained(folder, max_shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert_refused(folder, shard.name, "no such file")


@pytest.mark.parametrize("names_it", [False, True])
def test_an_index_beside_a_whole_file(tmp_path, folder, names_it):
    """Loaders do not agree which of both counts; one that is the other's is no matter."""
    if names_it:
        index = {"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        load_model(EngineConfig(folder))
        return
    make_folder(tmp_path / "other", "qwen3").save_pretrained(tmp_path / "both", max_shard_size="60KB")
    (tmp_path / "both" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    told = "model.safetensors is beside model.safetensors.index.json, which names other files"
    assert_refused(tmp_path / "both", told)


def test_index_that_leaves_the_folder(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, "model.safetensors.index.json", "not a file of this folder")


@pytest.mark.parametrize("option", [{"dtype": "int3"}, {"attention": "flush"}, {"linear": "warp"}, {"linear": "fast"}])
def test_wrong_option(folder, option):
    with pytest.raises(ValueError, match=next(iter(option.values()))):
        load_model(EngineConfig(folder, **option))


def test_identity_names_config_weights_and_tokenizer(folder):
    identities = {model_identity(folder)}
    assert model_identity(folder) in identities
    (folder / "tokenizer.json").write_text("{}")
    identities.add(model_identity(folder))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    identities.add(model_identity(folder))
    change_config(folder, rms_norm_eps=1e-5)
    identities.add(model_identity(folder))
    assert len(identities) == 4


def test_end_of_sequence_ids_come_from_generation_config(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert read_spec(folder).eos_token_ids == (5, 7)
    (folder / "generation_config.json").unlink()
    assert read_spec(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("name", "told"), [("generation_config.json", " of generation_config.json"), ("config.json", "")]
)
def test_an_end_beyond_the_vocabulary_names_its_file(folder, name, told):
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=2)
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": 10**6}))
    with pytest.raises(ModelError, match=rf"config.json: eos_token_id 1000000{told} is not one of the vocabulary"):
        read_spec(folder)
