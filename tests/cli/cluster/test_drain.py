"""`baton drain --next-role` against a stand-in for a worker, whose answers to Describe are a test's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.cli.cluster import drain
from baton.cli.main import main
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from tests.support.pace import patience

OLD, NEW = pb.Hello(roles=["prefill"], epoch=1), pb.Hello(roles=["decode"], epoch=2)
BUSY, GONE = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE


class StandIn(worker_pb2_grpc.WorkerServicer):
    """Gives one answer after the other, the last of them for ever."""

    def __init__(self, answers: list[pb.Hello | grpc.StatusCode]):
        self._answers: Iterator = iter([OLD, *answers])
        self._last: pb.Hello | grpc.StatusCode = OLD

    def Describe(self, request, context):
        self._last = next(self._answers, self._last)
        return self._last if isinstance(self._last, pb.Hello) else context.abort(self._last, "by the test")

    def Drain(self, request, context):
        return pb.DrainResponse(role="prefill")


@pytest.mark.parametrize(
    ("answers", "start_s", "expected"),
    [
        ([BUSY, OLD, GONE, NEW], 60.0, 0),
        ([GONE, OLD, NEW], 60.0, 0),
        ([*[OLD] * 30, GONE, NEW], 0.25, 0),  # the grace period is not counted
        ([GONE], 0.25, 1),
    ],
    ids=["busy", "old", "grace", "gone"],
)
def test_a_worker_changes_its_role(answers, start_s, expected, monkeypatch, capsys):
    monkeypatch.setattr(drain, "_POLL_S", patience(0.02))
    monkeypatch.setattr(drain, "_START_S", patience(start_s))
    server = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServicer_to_server(StandIn(answers), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        status = main(["drain", address, "--next-role", "decode"])
    finally:
        server.stop(0)
    out, err = capsys.readouterr()
    assert status == expected
    assert out.startswith("decode worker after") if status == 0 else "does not answer as a decode worker" in err
