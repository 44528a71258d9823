"""One message of many: what it says, and what it keeps."""

from baton.v1 import inference_pb2 as pb
from gateway.answer.whole_answer import WholeAnswer
from tests.support.process import resident_bytes


def test_messages_of_two_choices():
    answer = WholeAnswer()
    for message in (
        pb.GenerateResponse(index=1, text="a", reasoning="x", seed=7, request_id="r"),
        pb.GenerateResponse(index=0, text="b", token_ids=[1]),
        pb.GenerateResponse(index=1, text="c", reasoning="y", finish_reason=pb.FINISH_REASON_STOP),
        pb.GenerateResponse(index=0, matched_stop="b", finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage()),
    ):
        answer.add(message)
    response = answer.response()
    assert [(c.index, c.text, c.reasoning, c.matched_stop) for c in response.choices] == [
        (0, "b", "", "b"), (1, "ac", "xy", ""),
    ]  # fmt: skip
    assert (response.seed, response.request_id) == (7, "r") and response.HasField("usage")


def test_a_long_answer_in_small_messages_keeps_its_own_bytes():
    before, answer = resident_bytes(), WholeAnswer()
    for _ in range(20_000):
        answer.add(pb.GenerateResponse(text="abcd"))
    assert len(answer.response().choices[0].text) == 80_000 and resident_bytes() - before < 200 << 20
