"""Hybrids through real processes: KV and the state behind it cross from the prefill to the decode worker, prefixes are
found where checkpoints stand, and a killed decode worker changes no token. So with a model of which some layers have a
window, whose workers give parts of blocks back."""

import shutil

import pytest

from tests.e2e.conftest import GATEWAY_OPTIONS, OPTIONS
from tests.e2e.recovery.waits import decoding_at
from tests.support import bare_engine
from tests.support.client import Client, gather
from tests.support.model_folders.families import make_folder
from tests.support.observe.probe import Probe
from tests.support.stack import SLOW_STEPS, Stack

EOS = (0, 4)  # of tests/support/models.py
LENGTHS = (1, 64, 100, 300)  # no span, one, some with a tail, two checkpoints
SAMPLINGS = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "drawn": {"temperature": 0.9, "seed": 3},
    "choices": {"temperature": 0.9, "seed": 4, "n": 3},
}
STEP = ("--checkpoint-tokens", "128")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("granite-4", "shm"), marks=pytest.mark.long),
        ("qwen3-next", "tcp"),
        pytest.param(("gemma3", "shm"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def kind(request):
    """A family, and how its state and KV cross."""
    return request.param


@pytest.fixture(scope="module")
def hybrid(kind, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid") / "tiny"
    make_folder(folder, kind[0], vocab_size=1024, max_position_embeddings=1024, eos_token_id=list(EOS))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def stack(kind, run_stack, hybrid):
    def of_hybrid(model, folder, **options) -> Stack:
        return Stack(hybrid, folder, **options)

    options = (*OPTIONS, *STEP, "--transports", kind[1])
    with run_stack(
        f"hybrid-{kind[0]}",
        of_hybrid,
        num_decode=2,
        options=options,
        decode_options=("--speculator", "ngram"),
        gateway_options=GATEWAY_OPTIONS,
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack):
    client = Client(stack.target)
    yield client
    client.close()


@pytest.fixture(scope="module")
def questions(prompts):
    return {f"{name}-{length}": (prompts(length), SAMPLINGS[name]) for name in SAMPLINGS for length in LENGTHS}


@pytest.fixture(scope="module")
def answers(hybrid, questions):
    engine = bare_engine.load_engine(hybrid, num_blocks=160, threads=1)
    requests = [
        bare_engine.bare_request(name, ids, max_tokens=12, eos_ids=EOS, **fields)
        for name, (ids, fields) in questions.items()
    ]
    return {
        name: choices for request in requests for name, choices in bare_engine.serve_alone(engine, [request]).items()
    }


def test_split_equals_whole_and_again_from_the_cache(client, questions, answers):
    for turn in range(2):
        for name, (token_ids, fields) in questions.items():
            reply = client.generate(token_ids, max_tokens=12, **fields)
            found = {index: choice.token_ids for index, choice in reply.choices.items()}
            assert found == {index: choice.token_ids for index, choice in answers[name].items()}, (turn, name)
            if turn and len(token_ids) == 300:
                assert reply.usage.cached_tokens >= 256


def test_a_decode_worker_is_killed(stack, client, prompts):
    # So many that it is still written when it is known where: lookup in the prompt wrote 60 within a second.
    token_ids, fields = prompts(200), {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 9}
    expected = client.generate(token_ids, **fields)
    with stack.armed(SLOW_STEPS):
        call = client.stream(token_ids, **fields)
        messages = [next(call) for _ in range(6)]
        busy = decoding_at(stack)[0]
        busy.kill()
        messages += call
    assert gather(messages).outcome() == expected.outcome()
    stack.restart(busy)


def test_nothing_is_held_in_the_end(stack, client):
    for process in stack.workers:
        probe = Probe(stack.address[process.name])
        try:
            probe.wait_idle(timeout_s=20)
        finally:
            probe.close()
