"""Helpers that wait: for a true value, which they return, and not for ever."""

import asyncio

import pytest

from tests.support.waiting import until, until_async


def test_waiting_ends_with_what_became_true():
    answers = iter((0, None, "here"))
    assert until(lambda: next(answers)) == "here"


async def test_a_coroutine_function_is_asked_until_it_is_true():
    answers = iter((0, None, "here"))

    async def ask():
        await asyncio.sleep(0)
        return next(answers)

    assert await until_async(ask) == "here"


async def test_waiting_in_vain_says_for_what():
    with pytest.raises(AssertionError, match="not so within .* s: a sign of life"):
        until(lambda: False, "a sign of life", timeout_s=0.01)
    with pytest.raises(AssertionError, match="not so within .* s: the last state"):
        await until_async(lambda: False, lambda: "the last state", timeout_s=0.01)


async def test_a_condition_that_hangs_is_given_up():
    with pytest.raises(AssertionError, match="an answer"):
        await until_async(asyncio.Event().wait, "an answer", timeout_s=0.01)
