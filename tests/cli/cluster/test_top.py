"""`baton top`: one look, from what a gateway would say."""

import pytest

from baton.cli.cluster.top import frame
from baton.cli.main import main
from baton.v1 import fleet_pb2 as pb
from baton.v1 import inference_pb2, worker_pb2


@pytest.fixture
def workers():
    load = worker_pb2.Load(num_running=3, num_waiting=1, tokens_per_s=250, num_blocks_total=100)
    load.blocks_by_holder.extend([0, 5, 10, 35, 30, 20])
    return pb.ListWorkersResponse(
        workers=[
            pb.WorkerView(
                address="10.0.0.1:50052", role="decode", state="serving", load=load, clock_offset_s=1.5,
                clock_error_s=0.0004,
            )
        ]
    )  # fmt: skip


def view(**fields) -> pb.RequestView:
    return pb.RequestView(timing=inference_pb2.Timing(ttft_s=0.25, tpot_s=0.02), **fields)


def test_a_frame_shows_workers_and_requests_cut_to_the_terminal(workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    requests = pb.ListRequestsResponse(
        running=[view(request_id="slowest", phase="decode", age_s=7.5, prompt_tokens=80, output_tokens=4)],
        recent=[view(outcome="ok"), view(outcome="failed"), view(outcome="refused"), view(outcome="refused")],
        num_running=1,
        uptime_s=60,
        bound="Bound by queue: requests wait.",
    )
    text = frame("door:1", workers, requests, "4.0 requests/s")
    assert "baton door:1  ready" in text and "4.0 requests/s" in text
    assert (
        "TTFT  p50    250.0 ms" in text
        and "TPOT  p50     20.0 ms" in text
        and "of the last 4: 1 ok, 2 refused, 1 failed" in text
    )
    worker = next(line for line in text.splitlines() if "decode 10.0.0.1" in line)
    assert worker.split()[2:] == ["serving", "3", "1", "250", "50%", "30%", "20%", "+1500.0", "±", "0.4", "ms"]
    assert text.splitlines()[-1] == "Bound by queue: requests wait."
    assert "slowest" in text and "decode" in text and "7.50s" in text


def test_a_narrow_terminal(workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, frame("t", workers, pb.ListRequestsResponse(), "").splitlines())) <= 40


def test_a_clock_that_is_not_compared_yet(workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for field in ("clock_offset_s", "clock_error_s"):
        workers.workers[0].ClearField(field)
    line = next(line for line in frame("t", workers, pb.ListRequestsResponse(), "").splitlines() if "decode 10" in line)
    assert line.endswith(" -")


def test_several_models(workers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert "MODEL" not in frame("t", workers, pb.ListRequestsResponse(), "")
    workers.workers[0].model = "chat"
    workers.models.add(name="chat", state="serving", num_running=3, num_waiting=1, num_prefill=2, num_decode=4)
    workers.models.add(name="code", state="waiting", reason="no decode worker serves: none is configured")
    lines = frame("t", workers, pb.ListRequestsResponse(), "").splitlines()
    chat, code = (next(line for line in lines if line.startswith(name)) for name in ("chat ", "code "))
    assert chat.split() == ["chat", "serving", "3", "1", "2,", "4"]
    assert code.endswith("0, 0  no decode worker serves: none is configured")
    assert next(line for line in lines if "10.0.0.1" in line).endswith("  chat")


def test_a_fleet_that_is_not_ready(workers):
    workers.not_ready = "no decode worker serves"
    assert "not ready: no decode worker serves" in frame("t", workers, pb.ListRequestsResponse(), "")


def test_an_unreachable_gateway_is_one_line(capsys):
    assert main(["top", "--target", "127.0.0.1:9", "--once"]) == 1
    assert "nothing listens at 127.0.0.1:9" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 2
