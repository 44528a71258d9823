"""One answer by itself: what it holds back, and until when."""

import math

import pytest

from baton.v1 import inference_pb2 as pb
from gateway.answer.answer import Answer
from gateway.answer.answer_planner import AnswerPlan
from gateway.request.timing import Measured, Stamps
from gateway.request.validation import validate
from tests.gateway.answer.planned_calls import IDS, plan_of
from tests.support.client import make_request
from tests.support.gateway.served import SERVED

PLAIN = plan_of(conversation=None)


def answer_of(asked: AnswerPlan, **fields) -> tuple[Answer, list[pb.GenerateResponse]]:
    """An answer to such a request, and its messages."""
    sent = list[pb.GenerateResponse]()

    async def emit(message: pb.GenerateResponse) -> None:
        sent.append(message)

    validated = validate(make_request([1, 2, 3], max_tokens=9, **fields), SERVED)
    return Answer(validated, 3, 9, asked, Stamps(0.0), emit, lambda gap_s: None), sent


async def test_an_answer_that_has_ended_is_not_due_before_its_worker_has_reported():
    """It had been due all the time until then, and its request ran without a pause."""
    answer, sent = answer_of(PLAIN, stream_interval_ms=60_000)
    answer.push(0, 0, [10], (), 0)
    await answer.flush()
    answer.push(0, 1, [11], (), 0)
    assert len(sent) == 1 and answer.due_at < math.inf
    answer.push(0, 2, [12], (), pb.FINISH_REASON_STOP)
    await answer.flush()
    assert len(sent) == 1 and answer.due_at == math.inf
    await answer.finish(0, Measured())
    assert [list(message.token_ids) for message in sent] == [[10], [11, 12]]


@pytest.mark.parametrize(
    ("stop", "reasoning", "text"),
    [
        ("</think>", "I look for naïve 🙂.", ""),
        (".\n</think>\n\nOne", "I look for naïve 🙂", ""),
        ("\n<tool_call>", "I look for naïve 🙂.", "One moment."),
    ],
)
def test_a_stop_string_is_found_where_a_part_of_it_is_a_token_of_the_form(stop, reasoning, text):
    answer, _ = answer_of(plan_of(), stop=[stop])
    answer.push(0, 0, IDS, (), pb.FINISH_REASON_STOP)
    message = answer.choices[0].take()
    assert (message.matched_stop, message.reasoning, message.text) == (stop, reasoning, text)
    assert not message.tool_calls
