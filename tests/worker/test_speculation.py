"""Speculation on the decode worker of a real pair: the same tokens, reported in what they cost; the prefill worker
knows nothing of it."""

import pytest

from baton.service.settings import make_settings
from baton.v1 import inference_pb2
from baton.worker.settings import WorkerSettings
from tests.support.bare_engine import answer_alone
from tests.support.models import make_model
from tests.support.worker.scripted import make_spec, run_bounded, run_pair, worker_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


def test_split_equals_whole_and_says_what_was_accepted(model):
    decode = dict(speculator="auto", draft_model=model, num_draft_tokens=4)
    sampled = dict(temperature=1.0, seed=7, n=3, top_k=50)

    async def main():
        async with run_pair(model, decode=decode) as (pair, _, worker):
            assert list(pair.decode.hello.model.proposers) == ["ngram", "draft"]
            assert not pair.prefill.hello.model.proposers
            greedy = await pair.generate("greedy", make_spec(worker_prompt(200), max_tokens=30))
            seeded = await pair.generate("seeded", make_spec(worker_prompt(130, 2), max_tokens=9, **sampled))
            spec = make_spec(worker_prompt(150, 3), max_tokens=20)
            spec.speculation.CopyFrom(inference_pb2.Speculation(proposer="draft", num_tokens=2))
            narrow = await pair.generate_here("narrow", spec)
            spec.speculation.CopyFrom(inference_pb2.Speculation(proposer="off"))
            plain = await pair.generate_here("plain", spec)
            await pair.prefill.wait_idle()
            await pair.decode.wait_idle()
            return greedy, seeded, narrow, plain, worker.engine.load_report()

    greedy, seeded, narrow, plain, load = run_bounded(main)
    assert greedy.token_ids == answer_alone(model, worker_prompt(200), 30)
    assert seeded.token_ids == answer_alone(model, worker_prompt(130, 2), 9, **sampled)
    assert narrow.token_ids == plain.token_ids == answer_alone(model, worker_prompt(150, 3), 20)
    report = greedy.ended.decode
    # The draft is the model itself, and right but for a row that two kernels round differently.
    assert 25 <= report.num_steps + sum(report.accepted_by_position) <= 30 and report.num_steps < 15
    assert len(report.proposed_by_position) == 4 and report.num_drafts > 0 and report.speedup > 0
    assert len(narrow.ended.decode.proposed_by_position) == 2
    assert not plain.ended.decode.proposed_by_position and plain.ended.decode.speedup == 1.0
    assert load.num_draft_tokens >= load.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(speculator="draft"), "--speculator draft: give its folder with --draft-model"),
        (dict(speculator="ngram", draft_model="x"), "--draft-model has no effect with --speculator ngram"),
        (dict(num_draft_tokens=3), "--num-draft-tokens has no effect without --speculator"),
        (dict(speculator="ngram", num_draft_tokens=17), "--num-draft-tokens 17: must be 1 to 16"),
    ],
)
def test_options_that_make_no_sense(model, options, message):
    with pytest.raises(ValueError, match=message):
        make_settings(WorkerSettings, {"model": model, **options})
