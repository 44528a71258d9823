"""Two engines by random plans; and that what the fuzzer is for is found, and made small. More: python -m tests.fuzz."""

import pytest

from baton.engine.kv.ledger import Ledger
from baton.engine.kv.pool import KVPool
from baton.engine.schedule.admission import Admission
from baton.engine.schedule.group_actions import Ending, end
from baton.engine.schedule.sequence import Sequence
from tests.support.fuzz import fuzzers
from tests.support.fuzz.fuzzer import fuzz, words


@pytest.mark.parametrize(
    ("num_requests", "seed"), [(200, 0), *(pytest.param(400, seed, marks=pytest.mark.long) for seed in range(8))]
)
def test_two_engines_answer_as_none_would(num_requests, seed):
    counts, found = fuzz(fuzzers.ALL["toy"], num_requests, seed)
    print(dict(counts))
    assert not found, words(found)
    assert counts["done"] > num_requests / 3 and counts["fetches"] > num_requests / 6


def test_a_prefix_is_never_the_whole_prompt():
    """Another engine holds all spans of a prompt: one that is pulled leaves a token to compute, as gateways ask for it
    and workers see to it. A plan that hung, made small."""
    engines = [
        dict(block_size=size, num_blocks=num, max_num_seqs=1, max_num_batched_tokens=65, late=0)
        for size, num in ((2, 66), (4, 25))
    ]
    asked = dict(
        id="r0", shared=0, of=0, own=64, loops=0, max_tokens=1, n=2, sampling={}, course="split", at=1, named=1, tenant="c"
    )  # fmt: skip
    ops = [["go", "r0"], ["go", "r0"], ["step", 0, []], ["move", "r0", "prefix", 0]]
    plan = dict(seed=7, kind="toy", max_model_len=100, drafts="forced", num_draft_tokens=1)
    assert fuzzers.ALL["toy"].obey(plan | dict(engines=engines, requests=[asked], ops=ops))["done"] == 1


def test_nothing_lands_in_a_prefix_that_is_here():
    """A pull brings what is behind the taker's own prefix: what lands late, after its request was cancelled and others
    have the blocks of that prefix, would destroy their tokens. A plan that did, made small."""
    engines = [
        dict(block_size=size, num_blocks=num, max_num_seqs=1, max_num_batched_tokens=65, late=0)
        for size, num in ((16, 14), (8, 8))
    ]
    blank = dict(own=0, loops=0, max_tokens=0, n=0, sampling={}, named=1)
    first = blank | dict(id="r0", shared=64, of=1, course="split", at=1)
    requests = [
        first | dict(deadline_ms=1),
        first | dict(id="r4", shared=60, of=0, own=63, max_tokens=6, course="pull", at=0),
        first | dict(id="r6", own=1, course="pull", at=0),
        first | dict(id="r22", shared=0, of=0, own=33, max_tokens=2, course="pull", at=0, named=0, deadline_ms=1),
    ]
    go, step = {each["id"]: ["go", each["id"]] for each in requests}, ["step", 0, []]
    ops = [go["r0"]] * 2 + [step] + [go["r0"]] * 3 + [go["r4"]] * 2 + [go["r6"]] * 3
    ops += [step, ["step", 0, [[0, ["cancel", "r6"]]]], step, step]
    ops += [go["r22"], ["step", 0, [[0, go["r22"]]]], step, step]
    plan = dict(seed=2227734495924382072849, kind="toy", max_model_len=129, drafts="forced", num_draft_tokens=1)
    assert fuzzers.ALL["toy"].obey(plan | dict(engines=engines, requests=requests, ops=ops))["done"] == 4


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
        self.lifecycle.inbox.post(end(self.lifecycle, group, Ending("cancelled")))


def forgets_to_unreserve(self, num, unreserve=Ledger.unreserve):
    unreserve(self, max(0, num - 1))


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
    counts, found = fuzz(fuzzers.ALL["toy"], 1000, 1)
    assert found, dict(counts)
    assert len(found.plan["ops"]) <= 3 and len(found.plan["requests"]) <= 3, words(found)
