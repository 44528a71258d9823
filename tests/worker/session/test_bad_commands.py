"""A bad command of a gateway ends the key that it names, with an error that names the field: never a step, nor another
key."""

import asyncio
import contextlib
import logging
import math

import pytest
from google.protobuf.descriptor import FieldDescriptor as Kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.engine.core.request import Key, RequestEnded, TokenRun
from baton.service.codec import key_to_proto
from baton.v1 import worker_pb2 as pb
from baton.worker.legs.states import LegState
from baton.worker.wire.messages import request_of
from kvtransfer.naming import chain_hashes
from kvtransfer.transfer.fetcher import FetchReport
from tests.support.engine.collector import Collector
from tests.support.engine.handover import copy_kv
from tests.support.engine.toy_engine import CHAIN_ROOT, TOY_VOCAB, engine_request, toy_answer, toy_engine, toy_prompt
from tests.support.worker.fakes import LegMachineHarness, numbered_spec

NUM_TOKENS = 70
FETCHED = FetchReport(NUM_TOKENS, 12, 8, "shm", "exact", 0.1, 0.01, "because")
NUMBERS = (Kind.TYPE_UINT32, Kind.TYPE_UINT64, Kind.TYPE_INT32, Kind.TYPE_FLOAT)
FLOATS = (
    math.nan,
    math.inf,
    -math.inf,
    -1.0,
    0.0,
    1e-45,
    1e-38,
    1e-3,
    0.5,
    1.0,
    1.5,
    100.0,
    1000.0,
    1e4,
    -1000.0,
    3.4e38,
)
INTEGERS = (
    0,
    1,
    2,
    3,
    16,
    17,
    63,
    64,
    65,
    69,
    70,
    71,
    TOY_VOCAB - 1,
    TOY_VOCAB,
    129,
    500,
    512,
    513,
    2**31 - 1,
    2**31,
    2**32 - 1,
)


def good_spec(seed: int = 1) -> pb.RequestSpec:
    token_ids = toy_prompt(NUM_TOKENS, seed)
    hashes = chain_hashes(CHAIN_ROOT, token_ids)
    spec = pb.RequestSpec(
        token_ids=token_ids, num_prompt_tokens=NUM_TOKENS, span_hashes=hashes, chain_parent=hashes[-1], max_tokens=6,
        budget_ms=600_000,
    )  # fmt: skip
    spec.sampling.top_p = spec.sampling.repetition_penalty = 1
    spec.sampling.n = 1
    return spec


def _numbers_of(message) -> list[str]:
    return [field.name for field in message.DESCRIPTOR.fields if field.type in NUMBERS]


FIELDS = [(part, name) for part in ("", "sampling", "speculation", "pooling")
          for name in _numbers_of(getattr(good_spec(), part) if part else good_spec())]  # fmt: skip


@st.composite
def specs(draw) -> pb.RequestSpec:
    """A good one, with some numbers that are any."""
    spec = good_spec(draw(st.integers(0, 3)))
    for part, name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4)):
        message = getattr(spec, part) if part else spec
        field = message.DESCRIPTOR.fields_by_name[name]
        values = st.sampled_from(FLOATS) if field.type == Kind.TYPE_FLOAT else st.sampled_from(INTEGERS)
        with contextlib.suppress(ValueError):  # an int32 that is none
            if not field.is_repeated:
                setattr(message, name, draw(values))
            elif name == "token_ids":
                del message.token_ids[draw(st.integers(0, NUM_TOKENS)) :]
                message.token_ids.extend(draw(st.lists(values, max_size=4)))
            else:
                getattr(message, name).extend(draw(st.lists(values, max_size=TOY_VOCAB)))
    for token_id, bias in draw(st.dictionaries(st.sampled_from(INTEGERS), st.sampled_from(FLOATS), max_size=3)).items():
        spec.sampling.logit_bias[token_id] = bias
    if draw(st.booleans()):
        spec.chain_parent = draw(st.binary(max_size=40))
    if draw(st.booleans()):
        spec.traceparent = draw(st.text(max_size=60))
    return spec


@st.composite
def firsts(draw) -> list[pb.FirstToken]:
    number = st.sampled_from(INTEGERS)
    made = st.builds(pb.FirstToken, choice=number, token_id=number, finish_reason=st.sampled_from((0, 1, 2, 3, 99)))
    return draw(st.lists(made, max_size=4))


class ToyHarness(LegMachineHarness):
    """Commands with a real engine over a toy model, and a key in it that is not one of the bad one's business."""

    def __init__(self):
        super().__init__(engine=toy_engine(num_blocks=128))
        self.records = Collector()
        self.canary = engine_request("canary", toy_prompt(40, 7), 12, temperature=1.0, seed=3)
        self.engine.submit(self.canary)

    def steps(self, count: int) -> None:
        for _ in range(count):
            outputs = self.engine.step()
            self.records.take([output for output in outputs if output.key == self.canary.key])
            self.dispatcher.on_outputs([output for output in outputs if output.key != self.canary.key])

    def check(self, caplog) -> None:
        self.steps(14)
        assert self.records[self.canary.key].answer() == toy_answer(self.canary)
        for leg in list(self.dispatcher.legs.values()):
            self.dispatch(cancel=pb.Cancel(key=key_to_proto(leg.key)))
        self.steps(2)
        assert not self.dispatcher.legs and not self.engine.admission.groups
        self.engine.check_integrity()
        assert self.engine.ledger.num_available == self.engine.num_blocks
        assert "key failed" not in caplog.text, caplog.text
        for event in self.outbox.events:
            if event.HasField("ended"):
                assert event.ended.reason in ("", "CANCELLED", "DEADLINE_EXCEEDED", "BAD_COMMAND"), event
                assert event.ended.reason != "BAD_COMMAND" or event.ended.message


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


ONE = pb.Key(request_id="bad")
SETTINGS = settings(max_examples=75, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(specs(), st.sampled_from(("prefill", "admit")))
def test_any_numbers_in_a_request(caplog, spec, kind):
    async def main():
        harness = ToyHarness()
        harness.dispatch(**{kind: getattr(pb, kind.capitalize())(key=ONE, spec=spec)})
        harness.check(caplog)

    caplog.clear()
    asyncio.run(main())


@SETTINGS
@given(firsts())
@example([pb.FirstToken(choice=0, token_id=TOY_VOCAB)])
@example([pb.FirstToken(choice=0, token_id=3), pb.FirstToken(choice=0, token_id=4)])
@example([pb.FirstToken(choice=7, token_id=3)])
def test_any_numbers_in_first_tokens(caplog, tokens):
    async def main():
        harness = ToyHarness()
        key, source = Key("bad"), toy_engine()
        harness.dispatch(admit=pb.Admit(key=ONE, spec=good_spec()))
        acceptance = source.admission.accept(request_of(key, good_spec(), TOY_VOCAB))
        source.step()
        copy_kv(source, acceptance.blocks, harness.engine, harness.engine.admission.set_aside(key, NUM_TOKENS))
        harness.engine.admission.verify(key, NUM_TOKENS)
        harness.engine.admission.fetch_settled(key)
        harness.dispatch(fetch=pb.Fetch(key=ONE))
        harness.intake.end(key, FETCHED)
        harness.dispatch(start=pb.Start(key=ONE, first_tokens=tokens))
        harness.check(caplog)

    caplog.clear()
    asyncio.run(main())


@pytest.mark.parametrize("field, change", [
    ("stop_token_ids", lambda spec: spec.stop_token_ids.append(TOY_VOCAB)),
    ("stop_token_ids", lambda spec: spec.stop_token_ids.extend(range(TOY_VOCAB))),
    ("logit_bias", lambda spec: spec.sampling.logit_bias.update({TOY_VOCAB: 1.0})),
    ("logit_bias", lambda spec: spec.sampling.logit_bias.update({3: math.nan})),
    ("token_ids", lambda spec: spec.token_ids.__setitem__(3, TOY_VOCAB)),
    ("n", lambda spec: setattr(spec.sampling, "n", 2**32 - 1)),
    ("logprobs", lambda spec: setattr(spec.sampling, "logprobs", TOY_VOCAB + 1)),
    ("prompt_logprobs", lambda spec: setattr(spec.sampling, "prompt_logprobs", TOY_VOCAB + 1)),
    ("pooling", lambda spec: setattr(spec.pooling, "pooling", 9)),
    ("label_token_ids", lambda spec: spec.pooling.label_token_ids.append(TOY_VOCAB)),
    ("label_token_ids", lambda spec: spec.pooling.label_token_ids.extend([1] * 129)),
    ("pooling", lambda spec: (spec.pooling.SetInParent(), setattr(spec, "num_prompt_tokens", 3))),
    ("min_p", lambda spec: setattr(spec.sampling, "min_p", 1.5)),
    ("temperature", lambda spec: setattr(spec.sampling, "temperature", 1e-30)),
    ("presence_penalty", lambda spec: setattr(spec.sampling, "presence_penalty", 1e30)),
    ("top_p", lambda spec: setattr(spec.sampling, "top_p", 0)),
    ("repetition_penalty", lambda spec: setattr(spec.sampling, "repetition_penalty", 0)),
    ("max_tokens", lambda spec: setattr(spec, "max_tokens", 0)),
])  # fmt: skip
def test_what_would_fail_a_step_is_refused_by_name(field, change):
    spec = good_spec()
    request_of(Key("good"), spec, TOY_VOCAB)
    change(spec)
    with pytest.raises(ValueError, match=field):
        request_of(Key("bad"), spec, TOY_VOCAB)


async def test_the_name_of_a_key_that_goes_on_by_another_is_taken():
    """Its tokens still come by the engine's name, which no other key may have until then."""
    harness, key = LegMachineHarness(), Key("one", 1)
    first, second = key_to_proto(key), pb.Key(request_id="one", attempt=2)
    harness.dispatch(admit=pb.Admit(key=first, spec=numbered_spec()))
    harness.dispatch(fetch=pb.Fetch(key=first))
    harness.intake.end(key, FETCHED)
    harness.dispatch(start=pb.Start(key=first, first_tokens=[pb.FirstToken(token_id=7)]))
    harness.dispatch(harness.other, attach=pb.Attach(key=second, next_index=[1], budget_ms=60_000))
    harness.engine.answer["admit"] = ValueError("in use")  # what an engine says
    harness.dispatch(admit=pb.Admit(key=first, spec=numbered_spec()))
    assert harness.outbox.only("refused").reason == "in_use"
    harness.dispatcher.on_outputs([TokenRun(key, 0, 1, (8,))])
    assert harness.other.runs[-1] == TokenRun(Key("one", 2), 0, 1, (8,))
    harness.dispatcher.on_outputs([RequestEnded(key)])
    assert harness.other.only("ended").code == 0 and not harness.dispatcher.legs
    harness.engine.answer["admit"] = 0
    harness.dispatch(admit=pb.Admit(key=first, spec=numbered_spec()))  # free again
    assert harness.leg(key).state is LegState.ADMITTED


async def test_a_token_that_cannot_be_told_ends_its_key_alone():
    harness = LegMachineHarness()
    keys = [Key(name) for name in ("bad", "good")]
    for key in keys:
        harness.dispatch(prefill=pb.Prefill(key=key_to_proto(key), spec=numbered_spec()))
    for key in keys:
        leg = harness.leg(key)
        leg.record = None if key.request_id == "bad" else _Record()
    harness.dispatcher.on_outputs([TokenRun(key, 0, 1, (8,)) for key in keys])
    assert [run.key for run in harness.outbox.runs] == [Key("good")]
    assert harness.leg(keys[0]).state is LegState.ENDING and ("cancel", keys[0]) in harness.engine.calls


class _Record:
    def add(self, run):
        """Kept nowhere."""
