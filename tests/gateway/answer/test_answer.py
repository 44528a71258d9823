"""One answer by itself: what it holds back, and until when."""

import math

from baton.v1 import inference_pb2 as pb
from gateway.answer.answer import Answer
from gateway.request.timing import Measured, Stamps
from gateway.request.validation import check
from tests.gateway.answer.test_answer_reader import form
from tests.gateway.request.test_validation import SERVED
from tests.support.client import make_request


def answer_of(**fields) -> tuple[Answer, list[pb.GenerateResponse]]:
    """An answer to such a request, and its messages."""
    sent = list[pb.GenerateResponse]()

    async def emit(message: pb.GenerateResponse) -> None:
        sent.append(message)

    checked = check(make_request([1, 2, 3], max_tokens=9, **fields), SERVED)
    plain = form(conversation=None)
    return Answer(checked, 3, 9, plain, Stamps(0.0), emit, lambda gap_s: None), sent


async def test_an_answer_that_has_ended_is_not_due_before_its_worker_has_reported():
    """It had been due all the time until then, and its request ran without a pause."""
    answer, sent = answer_of(stream_interval_ms=60_000)
    answer.push(0, 0, [10], (), 0)
    await answer.flush()
    answer.push(0, 1, [11], (), 0)
    assert len(sent) == 1 and answer.due_at < math.inf
    answer.push(0, 2, [12], (), pb.FINISH_REASON_STOP)
    await answer.flush()
    assert len(sent) == 1 and answer.due_at == math.inf
    await answer.finish(0, Measured())
    assert [list(message.token_ids) for message in sent] == [[10], [11, 12]]
