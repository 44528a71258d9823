"""A stack by a plan: a small one in every run, with some faults. More: python -m tests.faults.gather stack COUNT."""

import pytest

from tests.support.fuzz.fuzzer import Fuzzer, fuzz, words
from tests.support.fuzz.stacks import Stacks, stack_plan
from tests.support.models import make_model


@pytest.mark.parametrize(
    ("num_requests", "num_faults"),
    [(60, 2), pytest.param(500, 10, marks=(pytest.mark.long, pytest.mark.timeout(1200)))],
)
def test_every_answer_is_that_of_one_engine(tmp_path, num_requests, num_faults):
    with Stacks(make_model(tmp_path / "tiny"), tmp_path / "stack") as stacks:
        fuzzer = Fuzzer("stack", lambda seed: stack_plan(seed, num_requests, num_faults), stacks.obey)
        counts, found = fuzz(fuzzer, num_requests, seed=1, max_tries=1)
    print(dict(counts))
    assert not found, words(found)
    assert counts["OK"] > num_requests / 2 and counts["faults"] == num_faults
