"""Sampling parameters: one record, whose numbers have a default and a range, and two messages with the same fields."""

from dataclasses import fields

import pytest
from google.protobuf.descriptor import FieldDescriptor as Kind

from baton.sampling_params import SAMPLING_DEFAULTS, SAMPLING_PARAMS, SamplingParams
from baton.v1 import inference_pb2, worker_pb2

ASKED, RESOLVED = (message.DESCRIPTOR.fields_by_name for message in (inference_pb2.Sampling, worker_pb2.WorkerSampling))


def test_both_messages_and_the_record_have_the_same_fields():
    """Fields are copied by name."""
    assert {each.name for each in fields(SamplingParams)} == set(RESOLVED)
    assert {name: field.type for name, field in ASKED.items()} == {name: field.type for name, field in RESOLVED.items()}


def test_every_number_has_a_default_and_a_range():
    assert SAMPLING_PARAMS.keys() >= {name for name, field in ASKED.items() if field.type == Kind.TYPE_FLOAT}
    assert set(SAMPLING_PARAMS) <= set(ASKED)
    for name, param in SAMPLING_PARAMS.items():
        assert param.range.problem(param.default) is None and param.range.problem(float("nan")), name
    assert worker_pb2.WorkerSampling(**SAMPLING_DEFAULTS).repetition_penalty == 1.0


def test_a_number_beyond_its_range_is_refused():
    for name, value in (("min_p", 1.5), ("top_p", 0.0), ("temperature", 1e-9), ("presence_penalty", float("nan"))):
        with pytest.raises(ValueError, match=f"sampling.{name} is .*: must be"):
            SamplingParams(**{name: value})
