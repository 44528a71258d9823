"""Constraints on their way through the gateway: checked, and sent to workers that say they keep them."""

import asyncio
import json

import pytest

from baton.v1 import inference_pb2 as pb
from gateway.text import constraint_checks
from tests.gateway.calls import PROMPT, expect_refusal, ids_of, read
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.pace import patience

GOOD = pb.Constraint(json_schema=json.dumps({"type": "object"}))
BAD = [
    ("constraint", pb.Constraint()),
    ("constraint.json_object", pb.Constraint(json_object=False)),
    ("constraint.json_schema", pb.Constraint(json_schema="{")),
    ("constraint.json_schema", pb.Constraint(json_schema='{"properties": {"a": {"minimun": 1}}}')),
    ("constraint.json_schema", pb.Constraint(json_schema='{"a":' * 10_000)),
    ("constraint.json_schema", pb.Constraint(json_schema=" " * 500_000)),
    ("constraint.regex", pb.Constraint(regex="(a")),
    ("constraint.choice", pb.Constraint(choice=pb.TextChoices())),
    ("constraint.grammar", pb.Constraint(grammar='start: start "a"')),
]


def constrained(constraint: pb.Constraint, prompt=PROMPT, **fields) -> pb.GenerateRequest:
    request = make_request(prompt, max_tokens=6, **fields)
    request.constraint.CopyFrom(constraint)
    return request


@pytest.mark.parametrize("field, constraint", BAD, ids=[f"{field} {index}" for index, (field, _) in enumerate(BAD)])
async def test_bad_ones_are_refused_by_name(cluster, capable, field, constraint):
    async with cluster() as c:
        error = await expect_refusal(read(c.stub.Generate(constrained(constraint), timeout=patience(20))))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", (field,))
        assert len(error.message) < 400
        assert not c.decode[0].kinds()
        await c.idle()


async def test_both_workers_get_it(cluster, capable):
    async with cluster() as c:
        messages = await read(c.stub.Generate(constrained(GOOD), timeout=patience(20)))
        assert ids_of(messages) == tokens_of(PROMPT, 6, 400)
        specs = [
            command.spec for worker in c.workers for kind, command in worker.commands if kind in ("admit", "prefill")
        ]
        assert len(specs) == 2 and all(spec.constraint == GOOD for spec in specs)
        assert len({spec.fingerprint for spec in specs}) == 1
        await c.idle()


async def test_no_worker_that_keeps_them(cluster):
    async with cluster() as c:
        error = await expect_refusal(read(c.stub.Generate(constrained(GOOD), timeout=patience(20))))
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("constraint",))
        assert "no decode worker that serves" in error.message
        assert ids_of(await read(c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))))
        await c.idle()


async def test_only_workers_that_keep_them_are_asked(cluster, monkeypatch):
    """Of two of each role the second does."""
    make, made = FakeWorker.__init__, []

    def every_other(self, *args, **hello):
        made.append(self)
        make(self, *args, **hello, features=["constraints"] * (len(made) % 2 == 0))

    monkeypatch.setattr(FakeWorker, "__init__", every_other)
    async with cluster(num_prefill=2, num_decode=2) as c:
        calls = [read(c.stub.Generate(constrained(GOOD, [*PROMPT, 20 + n]), timeout=patience(20))) for n in range(6)]
        assert all(ids_of(messages) for messages in await asyncio.gather(*calls))
        assert not c.prefill[0].kinds() and not c.decode[0].kinds()
        assert c.prefill[1].kinds() and c.decode[1].kinds()
        await c.idle()


async def test_one_that_explodes_slows_nobody(cluster, capable, monkeypatch):
    """Another's answer comes while the constraint is looked at."""
    monkeypatch.setattr(constraint_checks, "_MAX_WAIT_S", patience(60))  # it has to have its 2 s of a core
    explosion = pb.Constraint(grammar="start: A\nA: " + " & ".join(f"/(.*x.{{{n}}}.*)/" for n in range(8, 30)))
    async with cluster() as c:
        slow = asyncio.create_task(expect_refusal(read(c.stub.Generate(constrained(explosion), timeout=patience(90)))))
        for _ in range(3):
            assert ids_of(await read(c.stub.Generate(make_request(PROMPT, max_tokens=6), timeout=patience(20))))
        assert not slow.done()
        error = await slow
        assert (error.code.name, error.fields) == ("INVALID_ARGUMENT", ("constraint.grammar",))
        assert "make it simpler" in error.message
        await c.idle()
