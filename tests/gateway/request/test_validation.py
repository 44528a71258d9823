"""Every field of a request at its borders and beyond them; the error names the field."""

import math
from dataclasses import replace

import pytest

from baton.service.errors import InvalidRequest, NotFound
from baton.v1 import inference_pb2 as pb
from gateway.config.served_model import PRESETS, ServedModel
from gateway.model.model_folder import Defaults
from gateway.request.answer_length import resolve_max_tokens
from gateway.request.validation import check_detokenize, check_size, validate
from tests.support.client import make_request
from tests.support.gateway.served import SERVED

MAX_OUTPUT_TOKENS = PRESETS["normal"].output_tokens
WIDE = ServedModel("wide", 1 << 20, 400, frozenset(), Defaults())
PROMPT = [10, 20, 30]


def field_of(request, served=SERVED) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validated = validate(request, served)
        resolve_max_tokens(validated, len(request.token_ids.ids), served)
    assert caught.value.message.startswith(caught.value.field)
    return caught.value.field


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BAD = [
    ("slo_class", pb.GenerateRequest(text="x", slo_class="instant")),
    ("stream_interval_ms", pb.GenerateRequest(text="x", stream_interval_ms=60_001)),
    ("speculation.proposer", pb.GenerateRequest(text="x", speculation=pb.Speculation(proposer="eagle"))),
    ("speculation.num_tokens", pb.GenerateRequest(text="x", speculation=pb.Speculation(num_tokens=17))),
    ("input", make_request(None)),
    ("text", make_request("")),
    ("token_ids.ids", make_request([])),
    ("token_ids.ids[1]", make_request([1, 400])),
    ("token_ids", make_request([5] * 1024)),
    ("messages.messages", pb.GenerateRequest(messages=pb.Messages())),
    ("messages.messages[1].role", make_request([("user", "x"), ("", "y")])),
    ("messages.messages[0].role", make_request([("root", "x")])),
    ("request_id", make_request(PROMPT, request_id="a b")),
    ("request_id", make_request(PROMPT, request_id="x" * 65)),
    ("stopping.max_tokens", make_request(PROMPT, max_tokens=0)),
    ("stopping.max_tokens", make_request(PROMPT, max_tokens=1022)),
    ("stopping.max_tokens", make_request(PROMPT, max_tokens=2**32 - 1)),
    ("stopping.min_tokens", make_request(PROMPT, min_tokens=9, max_tokens=8)),
    ("stopping.min_tokens", make_request(PROMPT, min_tokens=1022)),
    ("sampling.temperature", make_request(PROMPT, temperature=-0.01)),
    ("sampling.top_p", make_request(PROMPT, top_p=0.0)),
    ("sampling.top_p", make_request(PROMPT, top_p=1.01)),
    ("sampling.min_p", make_request(PROMPT, min_p=-0.01)),
    ("sampling.min_p", make_request(PROMPT, min_p=1.01)),
    ("sampling.repetition_penalty", make_request(PROMPT, repetition_penalty=0.0)),
    ("sampling.n", make_request(PROMPT, n=0)),
    ("sampling.n", make_request(PROMPT, n=9)),
    ("sampling.logprobs", make_request(PROMPT, logprobs=21)),
    ("stopping.stop", make_request(PROMPT, stop=["x"] * 17)),
    ("stopping.stop[1]", make_request(PROMPT, stop=["a", ""])),
    ("stopping.stop[0]", make_request(PROMPT, stop=["é" * 129])),
    ("stopping.stop_token_ids", make_request(PROMPT, stop_token_ids=[9] * 1025)),
    ("stopping.stop_token_ids[0]", make_request(PROMPT, stop_token_ids=[400])),
    ("sampling.logit_bias", make_request(PROMPT, logit_bias={400: 1.0})),
    ("sampling.logit_bias", make_request(PROMPT, logit_bias={5: math.nan})),
    ("sampling.logit_bias", make_request(PROMPT, logit_bias={5: math.inf})),
    *((f"sampling.{name}", make_request(PROMPT, **{name: math.nan})) for name in FLOATS),
    *((f"sampling.{name}", make_request(PROMPT, **{name: -math.inf})) for name in FLOATS),
]


@pytest.mark.parametrize("field, request_", BAD, ids=[f"{i}-{field}" for i, (field, _) in enumerate(BAD)])
def test_the_field_is_named(field, request_):
    assert field_of(request_) == field


@pytest.mark.parametrize(
    "request_, words",
    [
        (make_request([5] * 1025), "prompt is too long: 1025 tokens > 1024"),
        (make_request([5] * 1024), "prompt is too long: 1024 tokens > 1023"),
        (make_request(PROMPT, max_tokens=1022), "input length and `max_tokens` exceed context limit: 3 + 1022 > 1024"),
        (make_request(PROMPT, max_tokens=5000), "must be 1 to 1023"),
    ],
    ids=["ids", "prompt", "room", "max_tokens"],
)
@pytest.mark.parametrize("is_bound", [False, True], ids=["model", "workers"])
def test_what_is_too_long_is_told_so_that_clients_can_shorten_it(request_, words, is_bound):
    served = replace(SERVED, is_bound_by_workers=is_bound)
    with pytest.raises(InvalidRequest) as caught:
        resolve_max_tokens(validate(request_, served), len(request_.token_ids.ids), served)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert words in caught.value.message and "maximum context length" in caught.value.message


def test_other_limits_are_no_length_of_the_context():
    for request, served in (
        (make_request(PROMPT, max_tokens=0), SERVED),
        (make_request(PROMPT, max_tokens=MAX_OUTPUT_TOKENS + 1), WIDE),
    ):
        with pytest.raises(InvalidRequest) as caught:
            validate(request, served)
        assert caught.value.reason == "INVALID_REQUEST"


def test_too_much_for_all_choices():
    assert field_of(make_request(PROMPT, n=8, max_tokens=MAX_OUTPUT_TOKENS // 8 + 1), WIDE) == "sampling.n"
    validated = validate(make_request(PROMPT, n=8, max_tokens=MAX_OUTPUT_TOKENS // 8), WIDE)
    assert resolve_max_tokens(validated, 3, WIDE) == MAX_OUTPUT_TOKENS // 8


def test_too_many_biases():
    assert field_of(make_request(PROMPT, logit_bias=dict.fromkeys(range(1025), 1.0)), WIDE) == "sampling.logit_bias"


def test_a_request_of_more_than_a_mebibyte_is_refused():
    check_size(make_request("a" * ((1 << 20) - 100)))
    for request, field in (
        (make_request("a" * (1 << 20)), "text"),
        (make_request([("user", "a" * (1 << 20))]), "messages"),
        (pb.GenerateRequest(request_id="a" * (1 << 20)), "request"),
        (pb.DetokenizeRequest(token_ids=[399] * (1 << 19)), "token_ids"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_size(request)
        assert caught.value.field == field


def test_texts_of_tokens_are_of_a_bounded_number():
    check_detokenize(pb.DetokenizeRequest(token_ids=[5] * 1025))
    check_detokenize(pb.DetokenizeRequest(token_ids=[5] * 1024, return_tokens=True))
    with pytest.raises(InvalidRequest, match="1025 ids, at most 1024") as caught:
        check_detokenize(pb.DetokenizeRequest(token_ids=[5] * 1025, return_tokens=True))
    assert caught.value.field == "token_ids"


def test_zero_is_a_value_and_unset_is_the_model_s():
    model = {"temperature": 0.75, "top_k": 50, "top_p": 0.875, "min_p": 0.125, "repetition_penalty": 1.25}
    served = ServedModel("fake", 1024, 400, frozenset([0]), Defaults(model, 99))
    unset = validate(make_request(PROMPT), served)
    sampling = unset.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.75, 50, 0.875)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.n) == (0.125, 1.25, 1)
    assert not sampling.HasField("logprobs")
    assert resolve_max_tokens(unset, 3, served) == 99 and resolve_max_tokens(unset, 1000, served) == 24
    zeros = validate(make_request(PROMPT, temperature=0.0, top_k=0, min_p=0.0, seed=0, logprobs=0), served).sampling
    assert (zeros.temperature, zeros.top_k, zeros.min_p, zeros.seed, zeros.logprobs) == (0.0, 0, 0.0, 0, 0)
    assert zeros.HasField("logprobs")


@pytest.mark.parametrize("given, counts_as", [(1e-30, 0.0), (1e-8, 0.0), (0.0005, 0.0), (0.001, 0.001), (0.01, 0.01)])
def test_a_temperature_that_programs_send_for_0_is_0(given, counts_as):
    request = make_request(
        PROMPT, request_id="a", temperature=given, resume_from=[1], seed=None if not counts_as else 1
    )
    assert validate(request, SERVED).sampling.temperature == pytest.approx(counts_as)


@pytest.mark.parametrize(
    "num_prompt_tokens, lengths, resume_from, most",
    [
        (3, (), (), 1021),  # no worker has said anything
        (3, (1024,), (), 1021),
        (1000, (1024,), (), 24),
        (3, (300, 1024), (), 297),
        (45, (300, 512, 1024), (), 512 - 45),  # the shortest has no room for 256
        (900, (300, 512, 1024), (), 124),
        (3, (300, 1024), (298,), 1021),  # it may have begun when there was no such worker
        (3, (300,), (), 297),  # one that may hold more is still to come, here and below
        (45, (300,), (), 255),
        (300, (300,), (), 724),
        (3, (300,), (298,), 1021),
    ],
)
def test_an_answer_may_be_as_long_as_the_context_leaves(num_prompt_tokens, lengths, resume_from, most):
    request = make_request(PROMPT, request_id="a", temperature=0.0, resume_from=resume_from)
    served = replace(SERVED, lengths=lengths)
    assert resolve_max_tokens(validate(request, served), num_prompt_tokens, served) == most


@pytest.mark.parametrize(
    "preset, asked, most",
    [
        ("normal", {}, 65_536),
        ("normal", {"n": 8}, 65_536),
        ("normal", {"n": 8, "logprobs": 0}, 65_536),
        ("normal", {"n": 8, "logprobs": 20}, 8192),
        ("strict", {}, 128),
        ("strict", {"n": 4, "logprobs": 5}, 128),
    ],
    ids=str,
)
def test_a_length_that_was_not_asked_for_is_within_the_limits(preset, asked, most):
    served = replace(WIDE, limits=PRESETS[preset])
    assert resolve_max_tokens(validate(make_request(PROMPT, **asked), served), 3, served) == most


@pytest.mark.parametrize("asked", [81_920, 131_072, 393_216])  # Qwen3's card, Kimi Code, clients of DeepSeek
def test_an_answer_may_be_asked_for_that_is_as_long_as_clients_want(asked):
    assert resolve_max_tokens(validate(make_request(PROMPT, max_tokens=asked), WIDE), 3, WIDE) == asked


def test_a_long_answer_has_few_log_probabilities():
    request = make_request(PROMPT, max_tokens=393_216, logprobs=1)
    assert resolve_max_tokens(validate(request, WIDE), 3, WIDE) == 393_216
    assert field_of(make_request(PROMPT, max_tokens=393_216, logprobs=2), WIDE) == "sampling.logprobs"
    assert resolve_max_tokens(validate(make_request(PROMPT, max_tokens=65_536, logprobs=20), WIDE), 3, WIDE) == 65_536


def test_stop_tokens_include_the_end_of_sequence_unless_ignored():
    assert validate(make_request(PROMPT, stop_token_ids=[9]), SERVED).stop_token_ids == {0, 4, 9}
    assert validate(make_request(PROMPT, stop_token_ids=[9], ignore_eos=True), SERVED).stop_token_ids == {9}


def test_seeds_and_ids_are_drawn():
    first, second = (validate(make_request(PROMPT), SERVED) for _ in range(2))
    assert first.sampling.seed != second.sampling.seed and first.sampling.seed < 2**53
    assert first.request_id != second.request_id


def test_unknown_model():
    with pytest.raises(NotFound):
        validate(make_request(PROMPT, model="other"), SERVED)
    assert validate(make_request(PROMPT, model="fake"), SERVED).prompt.token_ids.tolist() == [10, 20, 30]


def test_a_request_without_a_service_level_is_standard():
    assert validate(make_request(PROMPT), SERVED).slo_class == "standard"
    assert validate(pb.GenerateRequest(text="x", slo_class="batch"), SERVED).slo_class == "batch"


@pytest.mark.parametrize("proposer", ["", "off", "ngram"])
def test_a_proposer_that_is_run_may_be_named(proposer):
    asked = pb.Speculation(proposer=proposer, num_tokens=16)
    assert validate(pb.GenerateRequest(text="x", speculation=asked), SERVED).speculation == asked


def test_before_a_worker_has_said_what_it_runs_any_proposer_may_be_named():
    asked = pb.Speculation(proposer="eagle")
    assert validate(pb.GenerateRequest(text="x", speculation=asked), WIDE).speculation == asked
