"""Every family against transformers: fp32 logits within 1e-4, 64 greedy tokens equal, alone and in a mixed batch."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.models.loader import load_model
from baton.quantization.core.errors import QuantizeError
from baton.quantization.quantize import plan, quantize
from tests.support.engine.manual_batch import ManualBatch
from tests.support.model_folders.families import FAMILIES, LONG, SHORT, SMALL, make_folder, random_ids, randomize

TOLERANCE = 1e-4
NUM_GREEDY = 64
pytestmark = pytest.mark.usefixtures("one_thread")


PROMPTS = {"short": random_ids(5, 1), "middle": random_ids(70, 2), "long": random_ids(150, 3)}


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """A folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("model")
    return folder, make_folder(folder, request.param)


def theirs(model, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def their_choices(model, prompt: list[int], output: list[int]) -> list[int]:
    """Return what transformers takes for best behind the prompt and behind each token but the last: where that is the
    output, it is their greedy answer. One pass in place of one for each token: half of what these tests took."""
    logits = theirs(model, [*prompt, *output])[len(prompt) - 1 : -1]
    return [pick(row[None]) for row in logits]


def their_greedy(model, prompt: list[int]) -> list[int]:
    """Token by token: where a pass over all of them is another computation."""
    ids = torch.tensor([prompt])
    options = dict(max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def pick(logits: torch.Tensor) -> int:
    """The best token that is not an end of sequence, as `min_new_tokens` has it."""
    row = logits[-1].clone()
    row[SMALL["eos_token_id"]] = float("-inf")
    return int(row.argmax())


def greedy(
    hand: ManualBatch, prompts: dict[str, list[int]], chunk: int, count: int = NUM_GREEDY
) -> dict[str, list[int]]:
    """Chunked prefill and decode of all prompts in one batch; a sequence with its whole prompt read decodes beside the
    rest."""
    waiting = {name: list(ids) for name, ids in prompts.items()}
    output: dict[str, list[int]] = {name: [] for name in prompts}
    while any(len(ids) < count for ids in output.values()):
        work = {}
        for name in prompts:
            if waiting[name]:
                work[name], waiting[name] = waiting[name][:chunk], waiting[name][chunk:]
            elif len(output[name]) < count:
                work[name] = output[name][-1:]
        for name, logits in hand.step(work).items():
            if not waiting[name]:
                output[name].append(pick(logits))
    return output


# The slow backend says little about a family that the other has not said: one each with a window, latent rows, sinks,
# chunks.
BY_REFERENCE = ("llama3.1", "gemma2", "deepseek-v3", "gpt-oss", "llama4")


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((name, "auto") for name in FAMILIES),
        *((name, "reference") for name in BY_REFERENCE),
        *(pytest.param(name, "reference", marks=pytest.mark.long) for name in FAMILIES if name not in BY_REFERENCE),
    ],
    indirect=["family"],
    scope="module",
)
def test_logits_and_greedy(family, attention):
    folder, reference = family
    model = load_model(EngineConfig(folder, attention=attention))
    ours, logits = ManualBatch(model).step({"a": PROMPTS["long"]})["a"], theirs(reference, PROMPTS["long"])
    torch.testing.assert_close(ours, logits, atol=TOLERANCE, rtol=0)
    answers = greedy(ManualBatch(model), PROMPTS, chunk=48)
    assert answers == {name: their_choices(reference, PROMPTS[name], answer) for name, answer in answers.items()}
    assert greedy(ManualBatch(model), {"middle": PROMPTS["middle"]}, chunk=1000)["middle"] == answers["middle"]
    assert len(set(answers["long"])) > 3, "the model repeats itself, the comparison says little"


def test_an_activation_without_a_kernel(tmp_path):
    """Which any family may have, and torch computes."""
    reference, ids = make_folder(tmp_path, "llama3", hidden_act="relu2", hidden_size=64), random_ids(60, 4)
    logits = ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"]
    torch.testing.assert_close(logits, theirs(reference, ids), atol=TOLERANCE, rtol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
PHI = {"type": "yarn", "short_factor": SHORT, "long_factor": LONG}


@pytest.mark.parametrize(
    ("name", "changes", "written"),
    [
        ("phi3", {}, dict(rope_parameters=None, rope_scaling=PHI, original_max_position_embeddings=256)),
        ("llama4", dict(rope_parameters=YARN), {}),
        ("deepseek-v3", dict(rope_parameters=YARN | dict(mscale=0, mscale_all_dim=0)), {}),
        ("deepseek-v3", dict(hidden_size=52), dict(head_dim=None)),
    ],
    ids=["yarn-is-longrope", "normed-behind-yarn", "no-mscale", "odd-rows"],
)
def test_a_config_as_transformers_reads_it(tmp_path, name, changes, written):
    """Phi-3's name of longrope, a norm behind a rope that has a factor, DeepSeek's default of 0, and heads of 13
    elements that its latent attention does not have."""
    prefix, ids = FAMILIES[name][0], random_ids(100, 4)
    make_folder(tmp_path, name, **changes)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | written
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    reference = getattr(transformers, f"{prefix}ForCausalLM").from_pretrained(tmp_path).eval()
    logits = ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"]
    torch.testing.assert_close(logits, theirs(reference, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama3.1", "llama-yarn", "llama-linear", "mistral", "qwen2-window"])
def test_old_config_spelling(tmp_path, name):
    """`rope_scaling` beside `rope_theta`, and no layer_types: what folders from before transformers 5 have."""
    reference = make_folder(tmp_path, name)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters} if len(parameters) > 1 else None
    config.pop("layer_types", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    path.write_text(json.dumps(config))
    ids = random_ids(100, 4)
    logits = ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"]
    torch.testing.assert_close(logits, theirs(reference, ids), atol=TOLERANCE, rtol=0)


V3_ROUTER = dict(n_group=8, topk_group=4, routed_scaling_factor=2.5)
V3_EXPERTS = dict(n_routed_experts=16, num_experts_per_tok=5)


@pytest.mark.parametrize(
    ("name", "changes", "silent"),
    [
        ("deepseek-v3", V3_EXPERTS | V3_ROUTER, tuple(V3_ROUTER)),
        ("gpt-oss", dict(rope_parameters=None), ("rope_parameters",)),
    ],
    ids=["deepseek-v3", "gpt-oss"],
)
def test_what_a_silent_config_means(tmp_path, name, changes, silent):
    reference = make_folder(tmp_path, name, **changes)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in silent}))
    ids = random_ids(100, 4)
    logits = ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"]
    torch.testing.assert_close(logits, theirs(reference, ids), atol=TOLERANCE, rtol=0)


def test_a_text_model_within_another(tmp_path):
    """Llama 4 as it is published: beside a vision model, which is not read."""
    reference = make_folder(tmp_path, "llama4")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "dtype": text.pop("dtype", "float32")}
    del text["architectures"]
    path.write_text(json.dumps(outer | dict(text_config=text, vision_config=dict(hidden_size=32))))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    save_file(tensors | {"vision_model.class_embedding": torch.ones(4)}, tmp_path / "model.safetensors")
    ids = random_ids(60, 9)
    torch.testing.assert_close(
        ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"],
        theirs(reference, ids),
        atol=TOLERANCE,
        rtol=0,
    )
    path.write_text(json.dumps(outer))
    with pytest.raises(ModelError, match="config.json: text_config is None, not an object"):
        load_model(EngineConfig(tmp_path))


VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28)
QWEN_VISION = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)


@pytest.mark.parametrize(
    ("prefix", "name", "text", "vision"),
    [
        ("Gemma3", "gemma3", "gemma3_text", VISION | dict(model_type="siglip_vision_model", patch_size=14)),
        ("Mistral3", "mistral-full", "mistral", VISION | dict(model_type="pixtral", patch_size=14, head_dim=16)),
        ("Qwen3VL", "qwen3", "qwen3_vl_text", QWEN_VISION | dict(deepstack_visual_indexes=[0])),
        ("Qwen3_5", "qwen3.5", "qwen3_5_text", QWEN_VISION),
        ("Qwen3_5Moe", "qwen3.5-moe", "qwen3_5_moe_text", QWEN_VISION),
    ],
)
def test_text_models_within_models_that_see(tmp_path, prefix, name, text, vision):
    """As transformers saves them, vision encoder included."""
    torch.manual_seed(0)
    sizes = SMALL | dict(hidden_size=64, model_type=text) | FAMILIES[name][1]
    config = getattr(transformers, f"{prefix}Config")
    config = config(text_config=sizes, vision_config=vision, tie_word_embeddings=False)
    reference = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    randomize(reference, prefix)
    reference.save_pretrained(tmp_path)
    ids = random_ids(60, 9)
    torch.testing.assert_close(
        ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"],
        theirs(reference, ids),
        atol=TOLERANCE,
        rtol=0,
    )
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | dict(text_config=said["text_config"] | dict(model_type="other"))))
    with pytest.raises(ModelError, match=f"text_config is of model_type 'other'; what is served within is '{text}'"):
        load_model(EngineConfig(tmp_path))


def test_experts_of_qwen3_5_in_one_tensor(tmp_path):
    """As other tools save them, in place of a tensor for each."""
    make_folder(tmp_path, "qwen3.5-moe", hidden_size=64)
    ids = random_ids(40, 5)
    expected = ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"]
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}{index}.{name}_proj.weight") for index in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(ManualBatch(load_model(EngineConfig(tmp_path))).step({"a": ids})["a"], expected)
    with pytest.raises(QuantizeError, match="experts in one tensor are not quantized"):
        quantize(plan(tmp_path, "int8"), tmp_path / "made")


def test_sharded_equals_single(tmp_path):
    reference = make_folder(tmp_path / "single", "qwen3")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    ids = random_ids(30, 5)
    single, sharded = (
        ManualBatch(load_model(EngineConfig(tmp_path / name))).step({"a": ids})["a"] for name in ("single", "sharded")
    )
    assert torch.equal(single, sharded)


def test_dynamic_beyond_the_original_context(tmp_path):
    """The well-defined case: a prompt within the original context, decoded past it token by token."""
    reference = make_folder(tmp_path, "llama-dynamic", max_position_embeddings=64)
    model = load_model(EngineConfig(tmp_path))
    assert model.spec.context == 128
    ids = random_ids(50, 6)
    assert greedy(ManualBatch(model), {"a": ids}, chunk=1000)["a"] == their_greedy(reference, ids)


@pytest.mark.parametrize(("max_model_len", "num_tokens"), [(None, 60), (256, 200)])
def test_longrope_on_both_sides(tmp_path, max_model_len, num_tokens):
    """Short factors up to the original context, long ones where a longer context is served."""
    rope = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}
    reference = make_folder(tmp_path, "llama-longrope", rope_parameters={"rope_theta": 10000.0, **rope})
    model = load_model(EngineConfig(tmp_path, max_model_len=max_model_len))
    ids = random_ids(num_tokens, 7)
    torch.testing.assert_close(ManualBatch(model).step({"a": ids})["a"], theirs(reference, ids), atol=TOLERANCE, rtol=0)


def test_bf16_follows_transformers(tmp_path):
    """bf16 rounds at other places than transformers does: near, not equal."""
    reference = make_folder(tmp_path, "llama3.1", dtype=torch.bfloat16)
    model = load_model(EngineConfig(tmp_path))
    assert model.dtype == torch.bfloat16
    ids = random_ids(100, 8)
    ours, exact = ManualBatch(model, form="bf16").step({"a": ids})["a"], theirs(reference.float(), ids)
    error = (ours - exact).abs().mean() / exact.abs().mean()
    assert error < 0.03
