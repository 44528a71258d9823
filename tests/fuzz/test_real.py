"""Two engines over a real model, KV over real transports. More: python -m tests.fuzz real COUNT."""

import pytest

from tests.support.fuzz import fuzzers
from tests.support.fuzz.fuzzer import fuzz, words


@pytest.mark.parametrize("count", [12, pytest.param(600, marks=pytest.mark.long)])
def test_every_form_answers_as_one_engine_asked_alone(count):
    counts, found = fuzz(fuzzers.ALL["real"], count, count)
    print(dict(counts))
    assert not found, words(found)
    assert counts["done"] > count / 3 and counts["fetched by wire"]
