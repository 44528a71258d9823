"""Two engines by random plans; and that what the fuzzer is for is found, and made small. More: python -m tests.fuzz."""

import pytest

from baton.engine.kv.ledger import Ledger
from baton.engine.kv.pool import KVPool
from baton.engine.schedule.admission import Admission
from baton.engine.schedule.lifecycle import Ending
from baton.engine.schedule.sequence import Sequence
from tests.support.fuzz import fuzzers
from tests.support.fuzz.fuzzer import run, words
from tests.support.fuzz.plans import toy_plan


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(200, 0), *(pytest.param(400, seed, marks=pytest.mark.long) for seed in range(8))]
)
def test_two_engines_answer_as_none_would(num_requests, seed):
    counts, found = run(fuzzers.ALL["toy"], num_requests, seed)
    print(dict(counts))
    assert not found, words(found)
    assert counts["done"] > num_requests / 3 and counts["fetches"] > num_requests / 6


def no_copy(self, src, dst):
    """A tail that is the same block for two choices is at least not copied."""


def sealed_too_early(self, ledger, seal=Sequence.seal):
    """Names a unit of which the last token's KV is still to come."""
    self.num_computed += 1
    seal(self, ledger)
    self.num_computed -= 1


def ends_by_itself(self, key):
    """A key that ends around the table, on the caller's thread, while the loop may have it."""
    group = self.groups.get(key)
    if group is not None:
        self.lifecycle.inbox.post(self.lifecycle.end(group, Ending("cancelled")))


def forgets_to_unreserve(self, num, unreserve=Ledger.unreserve):
    unreserve(self, max(0, num - 1))


def test_a_prefix_is_never_the_whole_prompt():
    """A plan in which another engine holds all spans of a prompt: one that is pulled leaves a token to compute, as gateways
    ask for it and workers see to it."""
    fuzzers.ALL["toy"].obey(toy_plan(22277344728348360728))


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (KVPool, "copy_block", no_copy),
        pytest.param(Admission, "cancel", ends_by_itself, marks=pytest.mark.long),
        pytest.param(Sequence, "seal", sealed_too_early, marks=pytest.mark.long),
        pytest.param(Ledger, "unreserve", forgets_to_unreserve, marks=pytest.mark.long),
    ],
)
def test_a_planted_fault_is_found_and_made_small(monkeypatch, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    counts, found = run(fuzzers.ALL["toy"], 1000, 1)
    assert found, dict(counts)
    assert len(found.plan["ops"]) <= 3 and len(found.plan["requests"]) <= 3, words(found)
