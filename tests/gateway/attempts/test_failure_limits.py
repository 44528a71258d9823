"""What a client is told of a worker that gave no whole answer."""

import pytest

from baton.v1 import worker_pb2 as pb
from gateway.attempts.failure_limits import error_of
from gateway.link.mailbox import Lost, Stalled


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (None, "it gave no answer"),
        (Stalled(), "it gave no answer"),
        (Lost("no word from it"), "no word from it"),
        (pb.Ended(), "it ended early"),
        (pb.Done(), "it ended early"),
        (pb.Ended(code=13, message="a bug"), "a bug"),
    ],
)
def test_an_error_says_how_the_worker_ended(message, told):
    assert str(error_of(message, "prefill")).endswith(told)
