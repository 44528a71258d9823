"""The stop string that is complete first ends a choice, whatever pieces the text comes in; and at a cost that depends
on the text alone."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer.answer_planner import AnswerPlan
from gateway.answer.choice import LENGTH, STOP, Choice
from gateway.answer.stop_strings import StopMatcher, StopStrings
from tests.support.gateway.naive_text import held_back, stopped


def feed(stops, parts):
    matcher, out = StopMatcher(StopStrings(stops)), []
    for part in parts:
        text, matched = matcher.push(part)
        out.append(text)
        if matched is not None:
            return out, matched
    return [*out, matcher.finish()], None


def test_half_a_stop_string_is_held_back():
    assert feed(["END"], ["a E", "N", "x E", "ND b"]) == (["a ", "", "ENx ", ""], "END")
    assert feed(["END"], ["a E", "N"]) == (["a ", "", "EN"], None)
    assert feed(["aab"], ["aaab"]) == (["a"], "aab")
    assert feed([], ["a", "b"]) == (["a", "b", ""], None)


def test_the_one_that_is_complete_first():
    assert feed(["abcd", "bc"], ["abcd"])[1] == feed(["abcd", "bc"], ["ab", "c", "d"])[1] == "bc"
    assert feed(["c", "bc"], ["abc"]) == (["a"], "bc")


@settings(max_examples=1000)
@given(st.text("aé🙂", max_size=30), st.lists(st.text("aé🙂", min_size=1, max_size=6), max_size=5), st.data())
def test_as_the_naive_search_in_whatever_pieces(text, stops, data):
    """The output after each piece agrees, too: no character is held back that no stop string can claim."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    matcher, seen, out = StopMatcher(StopStrings(stops)), "", ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        said, matched = matcher.push(text[begin:end])
        seen, out = seen + text[begin:end], out + said
        expected, stop = stopped(seen, stops)
        assert matched == stop
        if matched is not None:
            assert out == expected
            return
        assert out == seen.removesuffix(held_back(seen, stops))
    assert out + matcher.finish() == text


class OneLetter:
    """A detokenizer whose tokens are letters."""

    def decoder(self, continues=False):
        return self

    def push(self, token_ids):
        return "".join(map(chr, token_ids))

    def finish(self):
        return ""


def cost(stops, text: str) -> float:
    """CPU seconds of one choice of an answer."""
    begun = time.thread_time()
    choice = Choice(0, AnswerPlan(OneLetter()), StopStrings(stops), 0)
    for index in range(0, len(text), 4):
        choice.push(list(map(ord, text[index : index + 4])), (), 0)
    return time.thread_time() - begun


def test_many_long_stop_strings_cost_what_one_short_one_does():
    """One holds 254 characters back, and fifteen might begin in each of them: 767 us a token once, 150 times what one
    word takes."""
    text = "a" * 20_000
    worst = ["a" * 254 + "b", *(chr(ord("c") + i) * 255 for i in range(15))]
    usual = min(cost(["END"], text) for _ in range(3))
    assert min(cost(worst, text) for _ in range(3)) < 6 * usual


@pytest.mark.parametrize(
    ("min_tokens", "said"),
    [(0, ("", "ab")), (2, ("ab", "ba")), (3, ("ab", "ba")), (4, ("abb", "ab")), (9, ("abbab", ""))],
)
def test_a_stop_string_that_ends_behind_min_tokens_is_found(min_tokens, said):
    """One that is complete before counts as text, whatever of it another may begin with."""
    choice = Choice(0, AnswerPlan(OneLetter()), StopStrings(["ab", "ba"]), min_tokens)
    choice.push(list(map(ord, "abbab")), (), LENGTH)
    message = choice.take()
    assert (message.text, message.matched_stop) == said
    assert message.finish_reason == (STOP if message.matched_stop else LENGTH)


@pytest.mark.parametrize("ends, text", [(None, "ab"), (frozenset([ord("c")]), "ab"), (frozenset([7]), "abc")])
def test_the_token_that_ends_a_choice_is_text_unless_it_is_a_stop_token(ends, text):
    """A constraint may be whole with a token of the text; without one nothing but a stop token stops a choice."""
    choice = Choice(0, AnswerPlan(OneLetter()), None, 0, stop_token_ids=ends)
    choice.push(list(map(ord, "abc")), (), STOP)
    message = choice.take()
    assert (message.text, message.finish_reason, len(message.token_ids)) == (text, STOP, 3)
