"""Read a key's output again from any index."""

from baton.engine.core.request import FinishReason, FirstToken, Key, Request, TokenLogprobs, TokenRun
from baton.sampling_params import SamplingParams
from baton.worker.legs.token_record import KEPT_LOGPROBS, TokenRecord

KEY, NEW = Key("one", 1), Key("one", 2)


def make(n: int = 1, logprobs: int | None = None, known: tuple[int, ...] = ()) -> Request:
    return Request(KEY, (1, 2, 3, *known), 3, SamplingParams(n=n, logprobs=logprobs), max_tokens=10_000)


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id, -1.0), ())


def test_tokens_of_an_earlier_attempt_come_first():
    record = TokenRecord(make(known=(4, 5)), (FirstToken(0, 6),))
    record.add(TokenRun(KEY, 0, 3, (7, 8), finish_reason=FinishReason.LENGTH))
    (whole,) = record.since(NEW, [0])
    assert (whole.key, whole.first_index, whole.token_ids) == (NEW, 0, (4, 5, 6, 7, 8))
    (rest,) = record.since(NEW, [4])
    assert (rest.first_index, rest.token_ids, rest.finish_reason) == (4, (8,), FinishReason.LENGTH)
    assert record.reaches([5]) and not record.reaches([6]) and not list(record.since(NEW, [5]))
    assert record.num_tokens(1) == [5]


def test_a_choice_that_ended_with_its_first_token_elsewhere():
    record = TokenRecord(make(n=2), (FirstToken(1, 6),))
    assert record.reaches([1, 0]) and not record.reaches([0, 0])
    assert [run.choice for run in record.since(NEW, [1, 0])] == [1]
    assert record.num_tokens(2) == [1, 1]


def test_logprobs_of_the_last_tokens_are_kept():
    record = TokenRecord(make(logprobs=0, known=(4,)), (FirstToken(0, 5, entry(5)),))
    assert record.reaches([1]) and not record.reaches([0]), "the first token's logprobs are not here"
    num = 2 * KEPT_LOGPROBS + 10
    for index in range(2, num):
        record.add(TokenRun(KEY, 0, index, (index,), (entry(index),)))
    assert record.reaches([num - KEPT_LOGPROBS]) and not record.reaches([2])
    (run,) = record.since(NEW, [num - 3])
    assert [each.chosen[0] for each in run.logprobs] == list(run.token_ids) == [num - 3, num - 2, num - 1]
