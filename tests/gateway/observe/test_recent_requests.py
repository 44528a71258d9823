"""The requests that operators see: running and ended ones, in order, bounded, and without a word of content."""

import asyncio
from dataclasses import asdict

from baton.service.errors import Overloaded
from baton.v1 import fleet_pb2 as pb
from baton.v1 import inference_pb2
from gateway.config.served_model import ServedModel
from gateway.model.model_folder import Defaults
from gateway.observe import recent_requests
from gateway.observe.recent_requests import RecentRequests
from gateway.request.request_state import RequestState
from gateway.request.timing import PHASES
from gateway.request.validation import validate
from tests.support.gateway.request_records import ANSWERED, record

ALL = pb.ListRequestsRequest()


def test_running_then_ended():
    kept, first, second = RecentRequests(), record(**ANSWERED), record()
    kept.began(first)
    kept.began(second)
    listed = kept.listed(ALL, num_waiting=1)
    assert (listed.num_running, listed.num_waiting, listed.num_ended) == (2, 1, 0)
    assert [view.phase for view in listed.running] == ["tokenize"] * 2 and not listed.recent
    kept.ended(first, None)
    kept.ended(second, Overloaded("full", 1.0, reason="QUEUE_WAIT"))
    listed = kept.listed(ALL, num_waiting=0)
    assert not listed.running and (listed.num_ended, listed.num_answered) == (2, 1)
    assert listed.num_output_tokens == 5  # of the answered one
    assert [(view.outcome, view.reason) for view in listed.recent] == [("refused", "QUEUE_WAIT"), ("ok", "")]
    assert listed.recent[1].timing.ttft_s == 1.0 and listed.recent[1].trace_id == f"{7:032x}"


def test_only_the_last_are_kept(monkeypatch):
    kept = RecentRequests()
    for _ in range(recent_requests.NUM_KEPT + 50):
        each = record()
        kept.began(each)
        kept.ended(each, asyncio.CancelledError())
    listed = kept.listed(pb.ListRequestsRequest(max_recent=10_000), 0)
    assert len(listed.recent) == recent_requests.NUM_KEPT and listed.num_ended == recent_requests.NUM_KEPT + 50
    assert len(kept.listed(pb.ListRequestsRequest(max_recent=3), 0).recent) == 3


def test_what_was_asked_is_not_kept():
    """A prompt may have a MiB, and the gateway says that it keeps none."""
    kept, each = RecentRequests(), record()
    each.request_id = "a1"
    request = inference_pb2.GenerateRequest(text="secret " * 100)
    request.sampling.logit_bias[7] = 1.0
    request.stopping.stop.append("secret")
    request.constraint.regex = "secret"
    each.validated = validate(request, ServedModel("tiny", 1024, 400, frozenset((0,)), Defaults()))
    kept.began(each)
    kept.ended(each, None)
    assert "secret" not in str(asdict(kept.last[0].record.validated)) and not each.validated.sampling.logit_bias
    assert kept.listed(ALL, 0).recent[0].request_id == "a1"


def test_every_state_has_its_phase():
    assert set(RequestState) - {RequestState.ENDED} | {record().phase} == recent_requests.PHASE_OF.keys()
    assert set(recent_requests.PHASE_OF.values()) - {"attach"} <= set(PHASES)


def test_a_view_of_a_request_has_no_content():
    names = {field.name for field in pb.RequestView.DESCRIPTOR.fields}
    assert not names & {"prompt", "text", "token_ids", "messages"}
