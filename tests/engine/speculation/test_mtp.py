"""Layers that checkpoints ship to predict further tokens: their guesses are those of transformers' layers, and answers
equal plain decoding."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.quantization.quantize import plan, quantize
from tests.support.engine.collector import run_to_end
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders import quantized_folders
from tests.support.model_folders.families import make_folder, random_ids

SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95, logprobs=1)
# What is around the layer, as each family names it: project, norms of embedding and features, the norm behind.
DEEPSEEK = ("model.layers.2.", "model.layers.2.", ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
QWEN = ("mtp.layers.0.", "mtp.", ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
LAYERS = ["linear_attention", "full_attention", "full_attention"]
# name -> what differs from its line in FAMILIES, the config as it is published, its names
KINDS = {
    "deepseek-v3": (dict(num_hidden_layers=3), dict(num_nextn_predict_layers=1), DEEPSEEK),
    "qwen3-next": (dict(layer_types=LAYERS, mlp_only_layers=[0]), dict(layer_types=LAYERS[:2]), QWEN),
}


def make_predicting(folder: Path, name: str, silent: bool = False):
    """Save a model whose last layer predicts further tokens; returns all of it as transformers has it, and what stands
    around that layer. `silent`: layers add nothing, so that a token follows from the one before."""
    changes, published, (layer, around, names) = KINDS[name]
    reference = make_folder(folder, name, hidden_size=64, **changes)
    tensors = load_file(folder / "model.safetensors")
    tensors = {key.replace("model.layers.2.", layer): value for key, value in tensors.items()}
    if silent:
        for key in tensors:
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                tensors[key].zero_()
    size = reference.config.hidden_size
    torch.manual_seed(1)
    offset = 1.0 if name == "qwen3-next" else 0.0
    norms = [torch.rand(size) + 0.5 - offset for _ in range(3)]
    project = torch.randn(size, 2 * size) / size**0.5
    if silent:
        project, norms[0] = torch.eye(size, 2 * size), torch.ones(size) - offset
        norms[2] = tensors["model.norm.weight"].clone()
    modules = dict(zip(names, (project, *norms), strict=True))
    tensors |= {f"{around}{key}.weight": value.contiguous() for key, value in modules.items()}
    if name == "deepseek-v3":  # copies, as it is published
        tensors |= {f"{layer}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
        tensors |= {f"{layer}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(num_hidden_layers=2) | published))
    return reference, project, [norm + offset for norm in norms]


@pytest.fixture(params=KINDS, scope="module")
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, *make_predicting(folder, request.param)


def load(folder: Path, **options) -> Engine:
    defaults = dict(block_size=16, num_blocks=96, max_num_seqs=6, max_num_batched_tokens=90, threads=1)
    return Engine.load(EngineConfig(folder, **(defaults | options)))


def requests() -> list:
    few = tuple((token_id, 25.0) for token_id in range(3, 6))
    return [
        engine_request("greedy", random_ids(70, 2), 60, logprobs=2),
        engine_request("sampled", random_ids(31, 5), 40, seed=7, **SAMPLED),
        engine_request("few", random_ids(40, 6), 60, logit_bias=few, logprobs=0),
    ]


def check(records, plain) -> None:
    for request in requests():
        assert records[request.key].answer() == plain[request.key].answer()
        assert records[request.key].logprobs == plain[request.key].logprobs


def test_answers_are_those_of_plain_decoding(made):
    plain = run_to_end(load(made[0]), requests())
    engine = load(made[0], speculator="mtp", num_draft_tokens=3)
    check(run_to_end(engine, requests()), plain)
    counts = engine.speculator.counts["mtp"]
    assert counts.num_drafts > 20 and counts.accepted[0] > 0
    firsts, rest = hand_over(load(made[0]), load(made[0], speculator="mtp", num_draft_tokens=3), requests())
    for request in requests():
        check_handed_over(firsts, rest, request, plain[request.key])


def test_a_rounded_model_keeps_the_layer_as_it_is(made, tmp_path):
    folder = tmp_path / "rounded"
    quantize(plan(made[0], "int8"), folder)
    engine = load(folder, speculator="mtp", num_draft_tokens=3)
    check(run_to_end(engine, requests()), run_to_end(load(folder), requests()))
    assert engine.speculator.counts["mtp"].num_drafts > 20


@pytest.mark.parametrize(("name", "listed"), [("deepseek-v3", []), ("qwen3-next", ["mtp.fc"])])
def test_an_fp8_folder_as_it_is_published(tmp_path, name, listed):
    """What projects into the layer is a float, which DeepSeek lists nowhere and Qwen by its name in the files."""
    make_predicting(tmp_path, name)
    quantized_folders.write_fp8(tmp_path, spread="row", modules_to_not_convert=listed)
    engine = load(tmp_path, speculator="mtp", num_draft_tokens=2)
    run_to_end(engine, requests()[:1])
    assert engine.speculator.counts["mtp"].num_drafts > 0


def test_a_full_slot_moves_down(made, monkeypatch):
    monkeypatch.setattr("baton.engine.speculation.proposers.feature_proposer.WINDOW", 8)
    engine = load(made[0], speculator="mtp", num_draft_tokens=2)
    predictor, moved = engine.speculator.proposers["mtp"], []
    move = predictor._move_down
    predictor._move_down = lambda context: (moved.append(context.num_rows), move(context))
    check(run_to_end(engine, requests()), run_to_end(load(made[0]), requests()))
    assert moved and min(moved) > 8


def test_guesses_are_those_of_the_layer(made):
    folder, reference, project, norms = made
    engine = load(folder, speculator="mtp", num_draft_tokens=2)
    predictor, seen = engine.speculator.proposers["mtp"], []
    propose = predictor.propose

    def watched(asks):
        drafts = propose(asks)
        seen.extend((len(ask.draftee.token_ids), draft[0]) for ask, draft in zip(asks, drafts, strict=True) if draft)
        return drafts

    predictor.propose = watched
    request = engine_request("a", random_ids(30, 2), 40)
    token_ids = [*request.token_ids, *run_to_end(engine, [request])[request.key].tokens[0]]
    begin = len(request.token_ids)
    expected = guesses(reference, project, norms, token_ids, begin)
    assert len(seen) > 20
    assert [guess for _, guess in seen] == [expected(length) for length, _ in seen]


def guesses(reference, project, norms, token_ids: list[int], begin: int):
    """Return what the last layer of `reference` guesses behind the first `length` tokens, of rows from `begin` on."""
    model, size = reference.model, reference.config.hidden_size

    def normed(x, weight):
        return torch.nn.functional.rms_norm(x, (size,), weight, 1e-6)

    layers, config = model.layers, model.config
    with torch.inference_mode():
        model.layers, config.num_hidden_layers = layers[:2], 2
        hidden = model(torch.tensor([token_ids])).last_hidden_state[0]
        model.layers, config.num_hidden_layers = layers, 3

    @torch.inference_mode()
    def guess(length: int) -> int:
        positions = torch.arange(begin, length - 1).unsqueeze(0)
        embedded = normed(model.embed_tokens(torch.tensor(token_ids[begin + 1 : length])), norms[0])
        x = torch.cat((embedded, normed(hidden[begin : length - 1], norms[1])), dim=1) @ project.t()
        mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
        x = x.unsqueeze(0)
        rotations = model.rotary_emb(x, positions)
        y = layers[2](x, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        y = (y[0] if isinstance(y, tuple) else y)[0, -1]
        return int((reference.lm_head.weight @ normed(y, norms[2])).argmax())

    return guess


@pytest.mark.parametrize("name", KINDS)
def test_what_follows_from_a_token_is_always_right(tmp_path, name):
    make_predicting(tmp_path, name, silent=True)
    request = engine_request("a", random_ids(9, 3), 60)
    engine = load(tmp_path, speculator="mtp", num_draft_tokens=4)
    assert (
        run_to_end(engine, [request])[request.key].answer()
        == run_to_end(load(tmp_path), [request])[request.key].answer()
    )
    counts = engine.speculator.counts["mtp"]
    assert sum(counts.accepted) == sum(counts.proposed) > 30


def test_mtp_is_refused_without_its_layer_or_beside_a_draft(tmp_path):
    make_folder(tmp_path / "llama", "llama3")
    with pytest.raises(ValueError, match="speculator mtp: .*llama ships no layer that predicts further tokens"):
        load(tmp_path / "llama", speculator="mtp")
    make_folder(tmp_path / "qwen", "qwen3-next")
    with pytest.raises(ModelError, match="tensor mtp.project.weight is missing"):
        load(tmp_path / "qwen", speculator="mtp")
    with pytest.raises(ValueError, match="draft_model has no effect with speculator mtp"):
        replace(EngineConfig(tmp_path), speculator="mtp", draft_model=tmp_path)
