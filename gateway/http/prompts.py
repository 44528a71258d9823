"""Prompts of one call: some of them at once, and those that are refused again."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

from baton.protocol import TENANT_TOKENS
from baton.service.clock import now
from baton.service.errors import InvalidRequest, Overloaded
from gateway.api.request_handler import CallContext
from gateway.request.prompt_batch import in_place

T = TypeVar("T")


async def serve_each(
    serve: Callable[[int, CallContext], Awaitable[T]],
    num_prompts: int,
    most_at_once: int,
    context: CallContext,
    begun: Collection[int] = (),
    place_of: Callable[[int, InvalidRequest], str] = lambda _, error: error.field or "",
) -> list[T]:
    """Serve the prompts of a call and return what becomes of each. One that is refused beside others of them is served
    again once fewer run, and once some are served a quota of tokens is waited out, within the deadline of `context`;
    but nothing is served again whose answer has `begun`. Raises what the first to fail does, and ends the others.
    `place_of(prompt, error)`: the call's word for what is wrong with one of several."""
    if num_prompts == 1:
        return [await serve(0, context)]
    turns = _Turns(serve, most_at_once, context, begun, place_of)
    tasks = [asyncio.ensure_future(turns.serve_in_turn(prompt)) for prompt in range(num_prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Turns(Generic[T]):
    """The turns of the prompts of one call: fewer at once after a refusal, one more after each that was served
    without."""

    def __init__(
        self,
        serve: Callable[[int, CallContext], Awaitable[T]],
        most_at_once: int,
        context: CallContext,
        begun: Collection[int],
        place_of: Callable[[int, InvalidRequest], str],
    ):
        self._serve, self._context, self._begun, self._begun_at = serve, context, begun, now()
        self._place_of = place_of
        self._most_at_once = self._num_at_once = most_at_once
        self._num_running = self._num_ended = 0
        self._is_any_served, self._changed = False, asyncio.Condition()

    async def serve_in_turn(self, prompt: int) -> T:
        """Return what becomes of a prompt. Raises BatonError."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_running < self._num_at_once)
                self._num_running += 1
            num_ended = self._num_ended
            try:
                return await self._serve_now(prompt)
            except Overloaded:
                # Refusals are paced: those that ran beside it may have ended before it is told.
                is_alone = self._num_running == 1 and self._num_ended == num_ended
                if is_alone or prompt in self._begun:
                    raise
                self._num_at_once = max(1, self._num_running - 1)
            except InvalidRequest as error:
                raise in_place(error, self._place_of(prompt, error)) from None
            finally:
                self._num_running -= 1
                self._num_ended += 1
                async with self._changed:
                    self._changed.notify_all()

    async def _serve_now(self, prompt: int) -> T:
        """Serve a prompt whose turn it is, which it keeps while it waits for a quota. Raises BatonError."""
        has_waited = False
        while True:
            try:
                answer = await self._serve(prompt, self._now())
            except Overloaded as error:
                if prompt in self._begun or not self._is_to_wait(error):
                    raise
                self._num_at_once, has_waited = 1, True
                await asyncio.sleep(error.retry_after_s or 0.0)
            else:
                if not has_waited:  # else the quota has nothing for a second one
                    self._num_at_once = min(self._num_at_once + 1, self._most_at_once)
                self._is_any_served = True
                return answer

    def _is_to_wait(self, error: Overloaded) -> bool:
        """Return whether to wait as long as a refusal says. While others run it is their end that is waited for: they
        give back what they do not use."""
        is_quota = error.reason == TENANT_TOKENS and self._is_any_served and self._num_running == 1
        left_s = self._now().time_left_s
        return is_quota and (left_s is None or (error.retry_after_s or 0.0) < left_s)

    def _now(self) -> CallContext:
        return self._context.after(now() - self._begun_at)
