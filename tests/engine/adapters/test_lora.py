"""Adapters against the weights that PEFT merges; and in mixed batches, bit for bit as alone."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.adapters.lora_folder import LoraFolder
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.core.request import Refusal
from baton.engine.engine import Engine
from tests.support.engine.collector import run_to_end
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.adapters import ATTENTION, MLP, PROMPT, TARGETS, identities, load_with_adapters
from tests.support.model_folders.families import make_adapter, make_folder, random_ids

SAMPLED = {"temperature": 0.9, "top_k": 50, "logprobs": 1}


def logprobs_of(engine: Engine, adapter: bytes = b"") -> torch.Tensor:
    """Of each token of the prompt, and of the one drawn behind it."""
    request = engine_request("asked", PROMPT, 2, prompt_logprobs=0, logprobs=0, adapter=adapter)
    record = run_to_end(engine, [request])[request.key]
    entries = [*record.first.prompt_logprobs, *record.logprobs[0]]
    return torch.tensor([entry.chosen[1] for entry in entries])


def expected(merged) -> torch.Tensor:
    with torch.no_grad():
        answer = merged.generate(torch.tensor([PROMPT]), max_new_tokens=2, min_new_tokens=2, do_sample=False)
        logprobs = merged(answer).logits[0, :-1].log_softmax(1)
    return logprobs.gather(1, answer[0, 1:, None])[:, 0]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("options", [{}, {"linear": "dense"}], ids=["fused", "composed"])
def test_equal_to_merged_weights(tmp_path, name, options):
    model = make_folder(tmp_path / "base", name, hidden_size=64)
    merged = make_adapter(tmp_path / "a", model, TARGETS[name])
    engine = load_with_adapters(tmp_path / "base", tmp_path / "a", **options)
    assert (logprobs_of(engine) - expected(model)).abs().max() < 1e-4
    found = logprobs_of(engine, identities(engine)["a"])
    assert (found - expected(merged)).abs().max() < 1e-4
    assert (expected(merged) - expected(model)).abs().max() > 0.1


@pytest.mark.parametrize("around", ["model.language_model.", "language_model.model."])
def test_one_of_a_text_model_within_another(tmp_path, around):
    """As PEFT names what it adds to a ...ForConditionalGeneration, of transformers now and before 4.52."""
    pattern = "layers.1.self_attn.q_proj"
    make_adapter(tmp_path / "a", make_folder(tmp_path / "base", "llama3"), ATTENTION, rank_pattern={pattern: 16})
    (tmp_path / "b").mkdir()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    config["rank_pattern"] = {around + pattern: 16}
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    renamed = {name.replace("model.layers.", f"{around}layers."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "b" / "adapter_model.safetensors")
    engine = load_with_adapters(tmp_path / "base", tmp_path / "a", tmp_path / "b")
    plain, within = (logprobs_of(engine, identities(engine)[name]) for name in "ab")
    assert torch.equal(plain, within) and not torch.equal(plain, logprobs_of(engine))


@pytest.mark.parametrize(
    "options",
    [
        dict(rank=64, use_rslora=True),
        dict(rank=256, alpha=32),
        dict(rank=5, alpha=3),
        dict(rank=8, rank_pattern={"layers.1.self_attn.q_proj": 16}, alpha_pattern={"v_proj": 4}),
    ],
    ids=["rslora", "256", "5", "patterns"],
)
def test_ranks_and_scales(tmp_path, options):
    model = make_folder(tmp_path / "base", "llama3", hidden_size=64)
    merged = make_adapter(tmp_path / "a", model, ["q_proj", "v_proj"], **options)
    engine = load_with_adapters(tmp_path / "base", tmp_path / "a")
    assert (logprobs_of(engine, identities(engine)["a"]) - expected(merged)).abs().max() < 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and three adapters of different ranks and targets."""
    folder = tmp_path_factory.mktemp("lora")
    model = make_folder(folder / "base", "llama3", hidden_size=64, intermediate_size=96)
    make_adapter(folder / "a", model, ATTENTION + MLP, rank=8, seed=1)
    make_adapter(folder / "b", model, ["q_proj", "down_proj"], rank=24, seed=2)
    make_adapter(folder / "c", model, ["v_proj", "gate_proj"], rank=16, seed=3)
    return [folder / name for name in ("base", "a", "b", "c")]


def mix(engine: Engine) -> list:
    """Requests of the base and of adapters, with one prompt and with others, greedy and seeded."""
    known = identities(engine)
    adapters = [b"", known["a"], known["b"], known["a"], b"", known["c"]]
    requests = []
    for index, adapter in enumerate(adapters):
        token_ids = PROMPT if index < 3 else random_ids(20 + index, index)
        options = SAMPLED | {"seed": index} if index % 2 else {"logprobs": 1}
        requests.append(engine_request(f"r{index}", token_ids, 16, named=False, adapter=adapter, **options))
    return requests


FORMS = {
    "fp32": {},
    "composed": {"linear": "dense"},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4-g32"},
    "ngram": {"speculator": "ngram"},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_mixed_as_alone(folders, options):
    """Chunked, with others of other adapters and of none: the bits of each are those it has alone."""
    engine = load_with_adapters(*folders, **options)
    requests = mix(engine)
    records = run_to_end(engine, requests)
    answers = set()
    for request in requests:
        alone = run_to_end(load_with_adapters(*folders, **options), [request])[request.key]
        assert not records[request.key].ended.error, records[request.key].ended.message
        assert records[request.key].answer() == alone.answer()
        assert records[request.key].logprobs == alone.logprobs, f"{request.key}: logprobs differ in their bits"
        answers.add(str(alone.logprobs))
    assert len(answers) == len(requests)


def test_threads_share_an_adapter(folders):
    """With the bits that one thread gives, of a prompt and of decode."""
    num_threads, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            engine = load_with_adapters(*folders, threads=threads)
            records = run_to_end(engine, mix(engine))
            found.append({key: record.logprobs for key, record in records.items()})
    finally:
        torch.set_num_threads(num_threads)
    assert found[0] == found[1]


def test_base_as_without_adapters(folders):
    requests = [request for request in mix(load_with_adapters(*folders)) if not request.adapter]
    plain, beside = (
        run_to_end(load_with_adapters(folders[0]), requests),
        run_to_end(load_with_adapters(*folders), requests),
    )
    assert all(plain[each.key].logprobs == beside[each.key].logprobs for each in requests)


def test_quantized_base(folders):
    """What an adapter adds is not rounded as the base is."""
    exact, rounded = load_with_adapters(*folders), load_with_adapters(*folders, quantization="int8")
    shifts = [logprobs_of(each, identities(each)["a"]) - logprobs_of(each) for each in (exact, rounded)]
    assert (shifts[0] - shifts[1]).square().mean() < 0.02 * shifts[0].square().mean()


def test_an_adapter_that_is_not_here(folders):
    engine = load_with_adapters(*folders)
    with pytest.raises(Refusal, match="no_adapter"):
        engine.submit(engine_request("unknown", PROMPT, adapter=bytes(32)))
    engine.check_integrity()


def test_identity_is_of_weights_and_config(folders, tmp_path):
    first = identities(load_with_adapters(*folders))["a"]
    copied = tmp_path / "other-name"
    copied.mkdir()
    for file in folders[1].iterdir():
        if file.is_file():
            (copied / file.name).write_bytes(file.read_bytes())
    assert identities(load_with_adapters(folders[0], copied))["other-name"] == first
    change(copied, lora_alpha=17)
    assert identities(load_with_adapters(folders[0], copied))["other-name"] != first


# ---- bad input ----


@pytest.fixture
def adapter(folders, tmp_path):
    """A copy of an adapter, to be spoilt."""
    copied = tmp_path / "bad"
    copied.mkdir()
    for file in folders[1].iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


def change(folder, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, make) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(make(load_file(path)), path)


def refusal(folders, adapter) -> str:
    with pytest.raises(ModelError) as error:
        load_with_adapters(folders[0], adapter)
    assert "\n" not in str(error.value) and str(adapter) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(peft_type="IA3"), "peft_type 'IA3': only LORA is served"),
        (dict(use_dora=True), "use_dora True: only plain LoRA"),
        (dict(bias="all"), "bias 'all': only plain LoRA"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save ['lm_head']: only plain LoRA"),
        (dict(init_lora_weights="pissa"), "init_lora_weights 'pissa' changes the base's weights; save the adapter with"),
        (dict(arrow_config={"top_k": 3}), "arrow_config {'top_k': 3}: only plain LoRA"),
        (dict(kasa_config={"beta": 1e-4}), "kasa_config {'beta': 0.0001}: only plain LoRA"),
        (dict(use_rslora="false"), "use_rslora is 'false': true or false is needed"),
        (dict(r=300), "has rank 300, at most 256 is served"),
        (dict(r=16), "this base and rank 16 ask for"),
        (dict(r="8"), "r is '8': a number above 0 is needed"),
        (dict(lora_alpha=float("inf")), "lora_alpha is inf: a number above 0"),
        (dict(rank_pattern={"(": 8}), "rank_pattern '(': "),
    ],
)  # fmt: skip
def test_configs_that_are_refused(folders, adapter, changes, words):
    change(adapter, **changes)
    assert words in refusal(folders, adapter)


def test_a_beginning_that_leaves_the_base_alone(folders, adapter):
    before = LoraFolder(adapter).files[1]
    for begun in (None, True, "gaussian", "eva"):
        change(adapter, init_lora_weights=begun)
        assert LoraFolder(adapter).files[1] == before


def nan(tensors):
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}


def embedding(tensors):
    return tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 4)}


def half(tensors):
    return {name: tensor for name, tensor in tensors.items() if "lora_A" in name}


def elsewhere(tensors):
    return {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nan, "holds values that are NaN or infinite"),
        (embedding, "embed_tokens.lora_embedding_A is no low-rank part of a linear layer"),
        (half, "has no lora_B"),
        (elsewhere, "is no linear layer of this base that adapters are served for"),
        (lambda tensors: {}, "holds no tensor"),
    ],
)
def test_tensors_that_are_refused(folders, adapter, make, words):
    change_tensors(adapter, make)
    assert words in refusal(folders, adapter)


def test_an_adapter_of_another_base_is_refused(tmp_path, folders):
    other = make_folder(tmp_path / "wide", "llama3", hidden_size=96)
    make_adapter(tmp_path / "wide-adapter", other, ATTENTION)
    assert "has shape [8, 96], this base and rank 8 ask for [8, 64]" in refusal(folders, tmp_path / "wide-adapter")


def test_files_that_are_not_there(folders, adapter):
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    assert "truncated or not a safetensors file" in refusal(folders, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: No such file" in refusal(folders, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "adapter_config.json: no such file" in refusal(folders, adapter)


def test_latent_attention_has_none(tmp_path, folders):
    make_folder(tmp_path / "latent", "deepseek-v3")
    with pytest.raises(ModelError, match="adapters are not served on latent attention"):
        load_with_adapters(tmp_path / "latent", folders[1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a",), "give NAME=DIR"),
        (("=dir",), "the name"),
        (("a=x", "a=y"), "adapter a: is given twice"),
    ],
)
def test_settings_that_are_refused(folders, given, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(folders[0], adapter=given)
