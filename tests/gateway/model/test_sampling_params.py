"""A sampling parameter is declared in the protos and in one file of the gateway."""

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor as Kind

import gateway
from baton.v1 import inference_pb2, worker_pb2
from gateway.model.sampling_params import SAMPLING_DEFAULTS, SAMPLING_PARAMS

ASKED, RESOLVED = (message.DESCRIPTOR.fields_by_name for message in (inference_pb2.Sampling, worker_pb2.WorkerSampling))


def test_both_messages_have_the_same_fields():
    """What is asked for is copied by name."""
    assert {name: field.type for name, field in ASKED.items()} == {name: field.type for name, field in RESOLVED.items()}


def test_every_number_has_a_default_and_a_range():
    assert SAMPLING_PARAMS.keys() >= {name for name, field in ASKED.items() if field.type == Kind.TYPE_FLOAT}
    assert set(SAMPLING_PARAMS) <= set(ASKED)
    for name, param in SAMPLING_PARAMS.items():
        assert param.range.problem(param.default) is None and param.range.problem(float("nan")), name
    assert worker_pb2.WorkerSampling(**SAMPLING_DEFAULTS).repetition_penalty == 1.0


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty"])
def test_one_file_names_it(name):
    """`observe/request_trace.py` names those that the GenAI conventions of OpenTelemetry have."""
    root = Path(gateway.__file__).parent
    naming = [str(path.relative_to(root)) for path in root.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())]
    assert naming == ["model/sampling_params.py"]
