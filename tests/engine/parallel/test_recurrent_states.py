"""Engines of ranks and of stages whose layers keep states: speculated, handed over to other shapes and gone on from a
checkpoint they give the answers of one process; and one line where states are not divided."""

import pytest

from baton.engine import native
from baton.engine.core.config import EngineConfig
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from tests.support.engine.collector import run_to_end
from tests.support.engine.forced import ForcedProposer
from tests.support.engine.handover import check_handed_over, hand_over
from tests.support.engine.toy_engine import engine_request
from tests.support.model_folders.families import SMALL, make_folder

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.usefixtures("forked_ranks"),
]
SHAPES = {
    "one process": {},
    "two ranks": {"tensor_parallel": 2, "threads": 2},
    "two stages": {"pipeline_parallel": 2},
    "two stages of two ranks": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
LONG = {"two stages of two ranks"}
PROMPT = [*range(5, 165), *range(5, 45)]
MAX_TOKENS = 24
ANSWERS: dict[tuple[str, int], list[int]] = {}  # that proposers know: two of three tokens are right
SPECULATES = {"speculator": "auto", "num_draft_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_folder(folder, "granite-4")
    return folder


@pytest.fixture(scope="module")
def engines(folder):
    """Loaded when they are asked for, and kept."""
    loaded: dict[tuple, Engine] = {}

    def load(shape: str, **options) -> Engine:
        key = shape, *options.items()
        if key not in loaded:
            options = {"threads": 1, "num_blocks": 64, "num_states": 8} | SHAPES[shape] | options
            proposers = [ForcedProposer(ANSWERS, 0.67, SMALL["vocab_size"])] if "speculator" in options else None
            loaded[key] = Engine.load(EngineConfig(folder, **options), proposers=proposers)
        return loaded[key]

    yield load
    for engine in loaded.values():
        if engine.ranks is not None:
            engine.ranks.close()


def request(name: str, **options):
    return engine_request(name, PROMPT, MAX_TOKENS, temperature=0.5, seed=3, logprobs=2, **options)


@pytest.fixture(scope="module")
def whole(engines):
    asked = request("whole", named=False)
    return run_to_end(engines("one process"), [asked])[asked.key]


def shapes(*names: str):
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in names]


@pytest.mark.parametrize("shape", shapes(*SHAPES))
def test_speculated_and_once_more_from_a_checkpoint(engines, whole, shape):
    engine = engines(shape, **SPECULATES)
    for turn in range(2):
        asked = request(f"{shape} {turn}")
        ANSWERS[asked.key.request_id, 0] = whole.tokens[0]
        found = run_to_end(engine, [asked])[asked.key]
        assert found.answer() == whole.answer() and found.logprobs == whole.logprobs
    counts = engine.speculator.counts["forced"]
    assert sum(counts.proposed) > sum(counts.accepted) > 0


@pytest.mark.parametrize("shape", ["one process", "two stages"])
def test_choices_that_find_no_state_wait_for_one(engines, shape):
    """Whether they begin from a checkpoint, which has a block too, or not."""
    few, many = engines(shape, num_states=4), engines("one process", num_states=32)
    for turn, n in enumerate((8, 1, 4, 4)):
        asked = request(f"{shape} {turn}", n=n)
        found, expected = (run_to_end(engine, [asked])[asked.key] for engine in (few, many))
        assert found.answer() == expected.answer() and found.logprobs == expected.logprobs


@pytest.mark.parametrize("source", shapes("two ranks", "two stages", "two stages of two ranks"))
@pytest.mark.parametrize("back", [False, True])
def test_decode_after_handoff_equals_whole(engines, whole, source, back):
    """To one process and from it."""
    ends = engines(source, **SPECULATES), engines("one process")
    prefill, decode = ends[::-1] if back else ends
    assert prefill.numerics_class == decode.numerics_class
    asked = request(f"{source} {back}", named=False)
    ANSWERS[asked.key.request_id, 0] = whole.tokens[0]
    firsts, rest = hand_over(prefill, decode, [asked])
    check_handed_over(firsts, rest, asked, whole)


@pytest.mark.parametrize(
    ("name", "changes", "options", "message"),
    [
        (
            "granite-4", {"mamba_n_heads": 2, "mamba_d_head": 64}, {"tensor_parallel": 4},
            "tensor_parallel 4: 4 ranks do not divide 2 heads with a state; 2 would do$",
        ),
        (
            "jamba", {}, {"tensor_parallel": 4},
            "tensor_parallel 4: .*one would have 24 elements, no multiple of 16; 2 would do$",
        ),
        (
            "granite-4", {"mamba_d_state": 24}, {"tensor_parallel": 2},
            "tensor_parallel 2: needs native kernels .* multiples of 16: a rank would have Mamba2Spec.*state_size=24",
        ),
        ("granite-4", {}, {"pipeline_parallel": 2, "remote_stages": 1}, "^remote_stages: states stay on one host"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_named(tmp_path, name, changes, options, message):
    make_folder(tmp_path, name, **changes)
    with pytest.raises((ModelError, ValueError), match=message):
        Engine.load(EngineConfig(tmp_path, threads=1, num_blocks=64, **options))
