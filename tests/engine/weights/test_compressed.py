"""compressed-tensors folders, written by the library itself, against its own decompression."""

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.weights.forms import DenseWeight, Fp8Weight, IntWeight
from tests.engine.weights.reading import assert_reads, assert_same_logits, read_all
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.compressed import INT4, write_compressed

ASYMMETRIC = INT4 | dict(symmetric=False)
INT8 = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
FP8 = dict(num_bits=8, type="float", symmetric=True)
TOKEN = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
FP8_TOKEN = dict(num_bits=8, type="float", strategy="token", dynamic=True, symmetric=True)
FP8_STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
FP8_GROUP = dict(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True, symmetric=True)


@pytest.mark.parametrize(
    ("layout", "weights", "activations"),
    [
        ("pack-quantized", INT4, None),
        ("pack-quantized", ASYMMETRIC, None),
        ("pack-quantized", INT4 | dict(group_size=64), None),
        ("pack-quantized", dict(num_bits=4, type="int", strategy="channel", symmetric=True), None),
        ("pack-quantized", dict(num_bits=4, type="int", strategy="channel", symmetric=False), None),
        ("pack-quantized", INT4 | dict(num_bits=8), None),
        ("pack-quantized", INT4 | dict(num_bits=8, symmetric=False), None),
        ("pack-quantized", INT8, None),
        ("int-quantized", INT8, TOKEN),
        ("int-quantized", INT8 | dict(strategy="tensor"), TOKEN),
        ("int-quantized", INT8 | dict(symmetric=False), TOKEN),
        ("naive-quantized", INT8, None),
        ("naive-quantized", INT8 | dict(strategy="group", group_size=32), None),
    ],
    ids=str,
)
def test_integers_of_compressed_tensors_are_read(tmp_path, layout, weights, activations):
    model = quantized_folders.dense_folder(tmp_path)
    meanings = write_compressed(tmp_path, layout, weights, activations)
    for weight in assert_reads(tmp_path, meanings).values():
        assert isinstance(weight, IntWeight) and weight.bits == weights["num_bits"]
        assert weight.activations == ("dynamic" if activations else "none")
        assert (weight.offsets is None) == weights["symmetric"]
    assert_same_logits(tmp_path, model, meanings)


def test_zero_points_of_one_word(tmp_path):
    """Of k and v, which have 4 outputs. (Of 8 outputs of 4 bits the library cannot read it itself.)"""
    model = quantized_folders.dense_folder(tmp_path, num_attention_heads=16, num_key_value_heads=1, head_dim=4)
    meanings = write_compressed(tmp_path, "pack-quantized", ASYMMETRIC | dict(num_bits=8))
    assert_reads(tmp_path, meanings)
    assert_same_logits(tmp_path, model, meanings)


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        (FP8 | dict(strategy="tensor"), FP8_STATIC, "static"),
        (FP8 | dict(strategy="channel"), FP8_TOKEN, "dynamic"),
        (FP8 | dict(strategy="channel"), None, "none"),
        (FP8 | dict(strategy="block", block_structure=[128, 128]), FP8_GROUP, "dynamic-block"),
    ],
    ids=str,
)
def test_floats_of_compressed_tensors_are_read(tmp_path, weights, activations, expected):
    model = quantized_folders.dense_folder(tmp_path, hidden_size=256, intermediate_size=384)
    meanings = write_compressed(tmp_path, "float-quantized", weights, activations)
    for weight in assert_reads(tmp_path, meanings).values():
        assert isinstance(weight, Fp8Weight) and weight.activations == expected
    assert_same_logits(tmp_path, model, meanings)


def test_ignored_modules(tmp_path):
    model = quantized_folders.dense_folder(tmp_path)
    skip = tuple(f"model.layers.{layer}.mlp.down_proj" for layer in range(2)) + ("model.layers.0.self_attn.q_proj",)
    ignore = [r"re:.*down_proj$", "model.layers.0.self_attn.q_proj"]
    meanings = write_compressed(tmp_path, "pack-quantized", INT4, skip=skip, ignore=ignore)
    dense = read_all(tmp_path, {skip[0]: torch.zeros(64, 128), skip[2]: torch.zeros(64, 64)})
    assert all(isinstance(weight, DenseWeight) for weight in dense.values())
    assert_same_logits(tmp_path, model, meanings)  # q stays apart from k and v


DOWN = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]


@pytest.mark.parametrize(
    ("target", "more_exact"),
    [
        ("Linear", ["re:.*down_proj$"]),
        ("Linear", DOWN),
        ("re:.*proj$", DOWN),
        ("re:.*proj$", ["re:.*down_proj$"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_first", [True, False])
def test_groups_that_target_the_same_module(tmp_path, target, more_exact, is_first):
    """Whatever their order, the library goes by names, then by expressions, as the alphabet has them, then by
    classes."""
    model = quantized_folders.dense_folder(tmp_path)
    others = {*quantized_folders.modules(load_file(tmp_path / "model.safetensors"))} - {*DOWN}
    meanings = write_compressed(tmp_path, "pack-quantized", ASYMMETRIC, skip=others)
    groups = [dict(targets=[target], weights=INT4), dict(targets=more_exact, weights=ASYMMETRIC)]
    groups = dict(zip("ab", groups if is_first else groups[::-1], strict=True))
    meanings |= write_compressed(tmp_path, "pack-quantized", INT4, config_groups=groups)
    for module, weight in assert_reads(tmp_path, meanings).items():
        assert (weight.offsets is not None) == (module in DOWN)
    assert_same_logits(tmp_path, model, meanings)


def test_a_part_of_a_name_is_less_than_a_class(tmp_path):
    """The library knows no parts of names."""
    quantized_folders.dense_folder(tmp_path)
    groups = {"a": dict(targets=["down_proj"], weights=ASYMMETRIC), "b": dict(targets=["Linear"], weights=INT4)}
    assert_reads(tmp_path, write_compressed(tmp_path, "pack-quantized", INT4, config_groups=groups))


def test_groups_by_input(tmp_path):
    """weight_g_idx, which the library has since given up: an order of inputs as GPTQ's."""
    model = quantized_folders.dense_folder(tmp_path)
    meanings = write_compressed(tmp_path, "pack-quantized", INT4)
    order = {size: torch.randperm(size, generator=torch.Generator().manual_seed(size)) for size in (64, 128)}

    def shuffle(tensors):
        for module, meaning in meanings.items():
            columns = order[meaning.shape[1]]
            unpacked = read_all(tmp_path, {module: meaning})[module].integers()
            shuffled = torch.empty_like(unpacked).index_copy_(1, columns, unpacked)
            packed = quantized_folders.words((shuffled.numpy().astype(int) + 8).T, 4).T.copy()
            tensors[f"{module}.weight_packed"] = torch.from_numpy(packed)
            groups = torch.empty(len(columns), dtype=torch.int32)
            groups[columns] = torch.arange(len(columns), dtype=torch.int32) // 32
            tensors[f"{module}.weight_g_idx"] = groups
            meanings[module] = torch.empty_like(meaning).index_copy_(1, columns, meaning)

    quantized_folders.change_tensors(tmp_path, shuffle)
    assert all(weight.order is not None for weight in assert_reads(tmp_path, meanings).values())
    assert_same_logits(tmp_path, model, meanings)
