"""Inputs of proposers, the choice of them, and the one line that refuses an unfit one before any request."""

import json
import random
import shutil

import pytest
import torch

from baton.engine.core.batch import ForwardBatch, SeqSlice
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.core.request import Speculation
from baton.engine.speculation.control.acceptance import AcceptanceRate
from baton.engine.speculation.control.tracks import Track
from baton.engine.speculation.proposers.draft_model import CHUNK_TOKENS, LAG_TOKENS, WINDOW_TOKENS
from baton.engine.speculation.proposers.proposer import Draftee, DraftRequest
from baton.engine.start_line import start_line
from tests.support.engine.collector import Collector, run_to_end
from tests.support.engine.forced import ForcedProposer, answers_of
from tests.support.engine.toy_engine import TOY_VOCAB, engine_request, toy_answer, toy_engine
from tests.support.model_folders.draft_models import DRAFT_VOCAB, load_draftable, make_target_and_draft, mixed_requests


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_target_and_draft(tmp_path_factory.mktemp("proposers"))


class Watching(ForcedProposer):
    """Keeps the target's rows of each sequence by position."""

    wants_hidden = True

    def __init__(self, *args):
        super().__init__(*args)
        self.rows: dict[tuple[str, int], dict[int, torch.Tensor]] = {}

    def advance(self, advances, hidden) -> None:
        super().advance(advances, hidden)
        for draftee, _, num_accepted, first_row in advances:
            rows = self.rows.setdefault((draftee.request.key.request_id, draftee.choice), {})
            first = len(draftee.token_ids) - num_accepted - 2
            for offset in range(num_accepted + 1):
                rows[first + offset] = hidden[first_row + offset].clone()


def hidden_of(engine, token_ids) -> torch.Tensor:
    """The target's rows of a whole sequence, computed at once."""
    num_tokens, block_size = len(token_ids), engine.pool.block_size
    table = torch.arange(-(-num_tokens // block_size))
    positions = torch.arange(num_tokens)
    batch = ForwardBatch(torch.tensor(token_ids), positions, positions, [SeqSlice(0, num_tokens, num_tokens, table)],
                         torch.tensor([num_tokens - 1]))  # fmt: skip
    with torch.inference_mode():
        return engine.runner.model.hidden(batch, engine.pool)[:num_tokens].clone()


def test_hidden_rows_are_those_of_their_positions(folders):
    prompts = [[(7 * index + j * j) % DRAFT_VOCAB for j in range(20 + 9 * index)] for index in range(5)]
    requests = [engine_request(f"r{index}", tokens, 40, n=1 + index % 2) for index, tokens in enumerate(prompts)]
    plain = run_to_end(load_draftable(folders[0]), requests)
    proposer = Watching(answers_of(plain), 0.7, DRAFT_VOCAB)
    engine = load_draftable(folders[0], proposers=[proposer], speculator="auto", num_draft_tokens=4)
    records = run_to_end(engine, requests)
    engine.step()
    assert not proposer.live and not engine.speculator.wants_hidden
    for request in requests:
        assert records[request.key].answer() == plain[request.key].answer()
        for choice, made in records[request.key].tokens.items():
            rows = proposer.rows[request.key.request_id, choice]
            num_prompt = len(request.token_ids)
            assert min(rows) >= num_prompt  # never those of a prompt
            last = max(rows)
            assert sorted(rows) == list(range(min(rows), last + 1)) and last >= num_prompt + 30
            whole = hidden_of(engine, [*request.token_ids, *made])
            assert all(torch.equal(row, whole[position]) for position, row in rows.items())


def test_nothing_is_kept_for_a_proposer_whose_try_is_over(folders):
    """One that follows hidden states would make each step of its rest a call of its own."""
    requests = [engine_request(f"r{index}", [1 + index, 2, 3], 400, named=False) for index in range(3)]
    plain = run_to_end(load_draftable(folders[0]), requests)
    proposer = Watching(answers_of(plain), 0.0, DRAFT_VOCAB)
    engine = load_draftable(folders[0], proposers=[proposer], speculator="auto")
    controller, num_kept = engine.speculator.controller, 0  # steps running
    for request in requests:
        engine.submit(request)
        while engine.has_work():
            engine.step()
            is_kept = engine.speculator.wants_hidden and controller.is_resting("forced", 1)
            num_kept = num_kept + 1 if is_kept else 0
            assert num_kept <= 1, "the next step closes it"
    assert engine.speculator.counts["forced"].num_drafts > 0, "it was tried"


@pytest.mark.parametrize(("probability", "is_left"), [(0.0, True), (0.5, True), (0.9, False)])
def test_a_proposer_that_is_clearly_worse_leaves_a_sequence_to_the_one_behind_it(probability, is_left):
    request = engine_request("a", [5 + index % 50 for index in range(40)], 300)
    answers = {("a", 0): toy_answer(request)[0][0]}
    first, behind = (ForcedProposer(answers, chance, TOY_VOCAB) for chance in (probability, 1.0))
    behind.name = "behind"
    engine = toy_engine(first, behind, speculator="auto", num_draft_tokens=2)
    assert run_to_end(engine, [request])[request.key].answer() == toy_answer(request)
    drafts = {name: count.num_drafts for name, count in engine.speculator.counts.items()}
    assert drafts["forced"] < 20 < drafts["behind"] if is_left else not drafts["behind"], drafts


def test_a_request_may_name_a_proposer_or_none(folders):
    target, draft = folders
    engine = load_draftable(target, speculator="auto", draft_model=draft, num_draft_tokens=3)
    assert list(engine.speculator.proposers) == ["ngram", "draft"]
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    asked = {
        name: engine_request(name, tokens, 20, speculation=Speculation(name)) for name in ("off", "draft", "eagle")
    }
    asked["none"] = engine_request("none", tokens, 20, speculation=Speculation(num_tokens=0))
    asked["wide"] = engine_request("wide", tokens, 20, speculation=Speculation("draft", 7))
    records = run_to_end(engine, list(asked.values()))
    reports = {name: records[request.key].ended.report for name, request in asked.items()}
    assert len({tuple(record.tokens[0]) for record in records.values()}) == 1
    assert all(reports[name].num_drafts == 0 for name in ("off", "none", "eagle"))  # eagle is not run here
    assert len(reports["draft"].proposed_by_position) == 3 and len(reports["wide"].proposed_by_position) == 7
    assert engine.speculator.counts["ngram"].num_drafts == 0


def test_the_start_line_says_what_speculates_and_what_it_takes(folders):
    target, draft = folders
    engine = load_draftable(target, speculator="auto", draft_model=draft)
    assert "speculation by ngram, draft, as many tokens as pay (" in start_line(engine)
    assert engine.speculator.num_bytes > draft.joinpath("model.safetensors").stat().st_size
    assert "speculation" not in start_line(load_draftable(target))


def test_a_draft_reads_a_long_prompt_chunk_by_chunk(folders):
    target, draft = folders
    engine = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=4)
    proposer = engine.speculator.proposers["draft"]
    chance = random.Random(0)
    draftee = Draftee(engine_request("a", [1] * 300, 9), 0, [chance.randrange(DRAFT_VOCAB) for _ in range(300)])
    proposer.open(draftee)
    assert draftee.state.begin == 300 - min(WINDOW_TOKENS, 512 // 2)
    assert proposer.propose([DraftRequest(draftee, 4)]) == [[]]
    assert proposer.num_unread(draftee.token_ids, None) == proposer.num_unread(draftee.token_ids, draftee) == 256
    used = []
    while proposer._lack(draftee) > LAG_TOKENS:
        used.append(proposer.prepare([draftee], 100))
    assert used and all(0 < num <= min(100, CHUNK_TOKENS) for num in used)
    assert proposer.prepare([draftee], 100) == 0
    (draft_ids,) = proposer.propose([DraftRequest(draftee, 4)])
    assert len(draft_ids) == 4
    assert proposer.num_unread(draftee.token_ids, draftee) == 0
    proposer.close(draftee)
    assert proposer.num_free_blocks == proposer.pool.num_blocks


def test_guesses_that_were_not_verified_are_judged_by_what_came():
    draftee = Draftee(engine_request("a", [1, 2, 3], 9), 0, [1, 2, 3, 4, 5, 6])
    track = Track(AcceptanceRate(), draftee, unverified=[4, 5, 9, 9], unverified_at=3)
    assert track.judge() == (3, 2)  # the fourth has not come
    assert not track.unverified


def test_a_draft_without_room_proposes_nothing(folders):
    """A sequence decodes plainly while the draft's pool is full."""
    target, draft = folders
    requests = mixed_requests(20, max_tokens=30, seed=9)
    plain, records = Collector(), Collector()
    run_to_end(load_draftable(target), requests, plain)
    engine = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=4)
    proposer = engine.speculator.proposers["draft"]
    del proposer._free[6:]
    run_to_end(engine, requests, records)
    engine.step()
    assert len(proposer._free) == 6
    assert all(records[key].answer() == plain[key].answer() for key in plain)
    assert engine.load_report().num_accepted_tokens > 0


def changed(folder, path, **config):
    shutil.copytree(folder, path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_what_does_not_fit_is_refused_at_start(folders, tmp_path):
    target, draft = folders
    with pytest.raises(ValueError, match="a vocabulary of 128, the model's is 64; give a draft with the same"):
        load_draftable(target, speculator="draft", draft_model=changed(draft, tmp_path / "vocabulary", vocab_size=128))
    with pytest.raises(ValueError, match="million parameters, the model has .*a draft must be smaller"):
        load_draftable(target, speculator="draft", draft_model=changed(draft, tmp_path / "larger", num_hidden_layers=4))
    with pytest.raises(ModelError, match="config.json: no such file"):
        load_draftable(target, speculator="draft", draft_model=tmp_path / "nowhere")
    with pytest.raises(ModelError, match="speculator 'oracle': one of draft, medusa, eagle"):
        load_draftable(target, speculator="auto", draft_model=changed(draft, tmp_path / "oracle", speculator="oracle"))
    with pytest.raises(ValueError, match="speculator eagle: .* holds what draft needs"):
        load_draftable(target, speculator="eagle", draft_model=draft)
    ours, theirs = changed(target, tmp_path / "ours"), changed(draft, tmp_path / "theirs")
    (ours / "tokenizer.json").write_text("{}")
    (theirs / "tokenizer.json").write_text("{ }")
    with pytest.raises(ValueError, match="another tokenizer.json than the model's"):
        load_draftable(ours, speculator="draft", draft_model=theirs)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(speculator="oracle"), "speculator 'oracle': one of off, auto, draft, ngram, suffix, medusa, eagle"),
        (dict(speculator="draft"), "speculator draft: give its folder with draft_model"),
        (dict(speculator="ngram", draft_model="x"), "draft_model has no effect with speculator ngram"),
        (dict(draft_model="x"), "draft_model has no effect with speculator off"),
        (dict(num_draft_tokens=3), "num_draft_tokens has no effect without speculator"),
        (dict(speculator="ngram", num_draft_tokens=17), "num_draft_tokens 17: must be 1 to 16"),
        (dict(speculator="ngram", num_draft_tokens=0), "num_draft_tokens 0: must be 1 to 16"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model=tmp_path, **options)
