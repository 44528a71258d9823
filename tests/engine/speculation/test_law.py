"""The law of speculated samples is the target's: three tokens in a row against exact probabilities, by chi-square."""

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.engine.core.request import PrefillDone, TokenRun
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.draft_models import DRAFT_VOCAB, load_draftable, make_target_and_draft

PROMPT = [5, 17, 40]
SETTINGS = {
    "plain": dict(temperature=1.0),
    "cool": dict(temperature=0.6),
    "top_k": dict(temperature=1.0, top_k=10),
    "top_p": dict(temperature=1.3, top_p=0.7),
    "min_p": dict(temperature=1.5, min_p=0.1),
    "penalties": dict(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "all": dict(temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, frequency_penalty=0.5, logit_bias=((3, 1.0),)),
}
CHOICES = 500
MIN_EXPECTED = 10.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_target_and_draft(tmp_path_factory.mktemp("law"), noise=0.1)


def probabilities(logits: torch.Tensor, outputs: torch.Tensor, options: dict) -> torch.Tensor:
    """fp64 [N, VOCAB] of raw logits [N, VOCAB] after `outputs` [N, M], written from the fields' definitions."""
    scores = logits.double().clone()
    for row, made in zip(scores, outputs.tolist(), strict=True):
        for token_id in {*PROMPT, *made}:
            penalty = options.get("repetition_penalty", 1.0)
            row[token_id] = row[token_id] * penalty if row[token_id] < 0 else row[token_id] / penalty
        for token_id in set(made):
            row[token_id] -= options.get("presence_penalty", 0.0)
            row[token_id] -= options.get("frequency_penalty", 0.0) * made.count(token_id)
    for token_id, bias in options.get("logit_bias", ()):
        scores[:, token_id] += bias
    scores /= options["temperature"]
    if top_k := options.get("top_k"):
        scores[scores < scores.topk(top_k).values[:, -1:]] = float("-inf")
    if (top_p := options.get("top_p", 1.0)) < 1.0:
        ordered, order = scores.sort(descending=True)
        shares = ordered.softmax(1)
        ordered[shares.cumsum(1) - shares >= top_p] = float("-inf")
        scores = scores.scatter(1, order, ordered)
    shares = scores.softmax(1)
    shares[shares < options.get("min_p", 0.0) * shares.amax(1, keepdim=True)] = 0
    return shares / shares.sum(1, keepdim=True)


def exact(folder, options: dict) -> torch.Tensor:
    """fp64 [VOCAB, VOCAB, VOCAB]: the chance of every three tokens after PROMPT."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    law = torch.ones(1, dtype=torch.float64)
    outputs = torch.empty(1, 0, dtype=torch.int64)
    for _ in range(3):
        ids = torch.cat([torch.tensor([PROMPT]).expand(len(outputs), -1), outputs], 1)
        with torch.no_grad():
            logits = torch.cat([model(part).logits[:, -1] for part in ids.split(1024)])
        law = (law.unsqueeze(1) * probabilities(logits, outputs, options)).view(-1)
        following = torch.arange(DRAFT_VOCAB).repeat(len(outputs)).unsqueeze(1)
        outputs = torch.cat([outputs.repeat_interleave(DRAFT_VOCAB, 0), following], 1)
    return law.view(DRAFT_VOCAB, DRAFT_VOCAB, DRAFT_VOCAB)


def sample(folders, options: dict, num_samples: int, first_seed: int) -> tuple[torch.Tensor, float]:
    """Counts int64 [VOCAB, VOCAB, VOCAB] of three tokens through submit, and the share of proposals accepted."""
    target, draft = folders
    limits = dict(max_num_seqs=CHOICES, max_num_batched_tokens=4 * CHOICES, num_blocks=2 * CHOICES)
    engine = load_draftable(target, speculator="draft", draft_model=draft, num_draft_tokens=2, **limits)
    counts = torch.zeros(DRAFT_VOCAB**3, dtype=torch.int64)
    for seed in range(-(-num_samples // CHOICES)):
        made = {}
        engine.submit(engine_request(f"s{seed}", PROMPT, 4, n=CHOICES, seed=first_seed + seed, **options))
        while engine.has_work():
            for output in engine.step():
                if isinstance(output, PrefillDone):
                    made.update({first.choice: [first.token_id] for first in output.first_tokens})
                elif isinstance(output, TokenRun):
                    made[output.choice] += output.token_ids
        assert len(made) == CHOICES and all(len(tokens) == 4 for tokens in made.values())
        codes = torch.tensor([tokens[:3] for tokens in made.values()]) @ torch.tensor(
            [DRAFT_VOCAB * DRAFT_VOCAB, DRAFT_VOCAB, 1]
        )
        counts += codes.bincount(minlength=DRAFT_VOCAB**3)
    load_report = engine.load_report()
    return counts.view(
        DRAFT_VOCAB, DRAFT_VOCAB, DRAFT_VOCAB
    ), load_report.num_accepted_tokens / load_report.num_draft_tokens


def p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Return the p-value of Pearson's statistic; cells that expect little are merged."""
    counts, expected = counts.reshape(-1).double(), law.reshape(-1) * counts.sum()
    assert not counts[expected == 0].any(), "a token that filters exclude was drawn"
    rare = expected < MIN_EXPECTED
    counts = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    counts, expected = counts[expected > 1], expected[expected > 1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2))


def check_law(folders, name: str, num_samples: int) -> None:
    """Each token alone, the last two, and all three. A value below 1e-4 comes by chance once in 300 runs of all
    settings (seen: min_p, the second token, 8e-5); it counts when a second, independent draw is below 1e-2 there
    too."""
    options = SETTINGS[name]
    law = exact(folders[0], options)
    first = p_values(folders, options, law, num_samples, 1000)
    if low := [index for index, value in enumerate(first) if value <= 1e-4]:
        second = p_values(folders, options, law, num_samples, 1_000_000)
        assert min(second[index] for index in low) > 1e-2, (first, second)


def p_values(folders, options: dict, law: torch.Tensor, num_samples: int, first_seed: int) -> list[float]:
    counts, accepted = sample(folders, options, num_samples, first_seed)
    assert 0.1 < accepted < 0.98, accepted
    summed = ((1, 2), (0, 2), (0, 1), (0,))
    return [*(p_value(counts.sum(axes), law.sum(axes)) for axes in summed), p_value(counts, law)]


@pytest.mark.parametrize("name", ["plain", "all"])
def test_three_tokens(folders, name):
    check_law(folders, name, 4 * CHOICES)


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_of_a_hundred_thousand_samples(folders, name):
    check_law(folders, name, 100_000)


def test_the_statistic_sees_a_wrong_law():
    law = torch.rand(DRAFT_VOCAB, DRAFT_VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    law /= law.sum()
    draw = torch.multinomial(law.view(-1), 100_000, True, generator=torch.Generator().manual_seed(1))
    counts = draw.bincount(minlength=DRAFT_VOCAB * DRAFT_VOCAB).view(DRAFT_VOCAB, DRAFT_VOCAB)
    assert p_value(counts, law) > 1e-4
    wrong = law.clone()
    wrong[:, :8] *= 1.3
    assert p_value(counts, wrong / wrong.sum()) < 1e-4
