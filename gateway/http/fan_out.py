"""Fan out the prompts of one call: serve several at a time, and retry those that are refused."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

from baton.protocol import TENANT_TOKENS
from baton.service.clock import now
from baton.service.errors import InvalidRequest, Overloaded
from gateway.api.request_handler import CallContext
from gateway.request.prompt_batch import in_place

T = TypeVar("T")


async def serve_all(
    serve: Callable[[int, CallContext], Awaitable[T]],
    num_prompts: int,
    most_at_once: int,
    context: CallContext,
    begun: Collection[int] = (),
    field_of: Callable[[int, InvalidRequest], str] = lambda _, error: error.field or "",
) -> list[T]:
    """Serve the prompts of a call and return the results in order. A prompt that is refused while others run is retried
    with fewer at a time; once some were served, an exhausted quota of tokens is waited for, within the deadline of
    `context`. A prompt whose answer has `begun` is not retried. Raises the first failure, and cancels the others.
    `field_of(prompt, error)`: the client's name for the field of an error with one of several prompts."""
    if num_prompts == 1:
        return [await serve(0, context)]
    limit = _ConcurrencyLimit(serve, most_at_once, context, begun, field_of)
    tasks = [asyncio.ensure_future(limit.serve_in_turn(prompt)) for prompt in range(num_prompts)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ConcurrencyLimit(Generic[T]):
    """Limit how many prompts of a call run at once: fewer after a refusal, one more after each prompt that is served
    without a refusal."""

    def __init__(
        self,
        serve: Callable[[int, CallContext], Awaitable[T]],
        most_at_once: int,
        context: CallContext,
        begun: Collection[int],
        field_of: Callable[[int, InvalidRequest], str],
    ):
        self._serve, self._context, self._begun, self._begun_at = serve, context, begun, now()
        self._field_of = field_of
        self._most_at_once = self._num_at_once = most_at_once
        self._num_running = self._num_ended = 0
        self._is_any_served, self._changed = False, asyncio.Condition()

    async def serve_in_turn(self, prompt: int) -> T:
        """Return the result of a prompt, once few enough run. Raises BatonError."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_running < self._num_at_once)
                self._num_running += 1
            num_ended = self._num_ended
            try:
                return await self._serve_now(prompt)
            except Overloaded:
                # Refusals are delayed, so prompts that ran beside this one may have ended meanwhile.
                is_alone = self._num_running == 1 and self._num_ended == num_ended
                if is_alone or prompt in self._begun:
                    raise
                self._num_at_once = max(1, self._num_running - 1)
            except InvalidRequest as error:
                raise in_place(error, self._field_of(prompt, error)) from None
            finally:
                self._num_running -= 1
                self._num_ended += 1
                async with self._changed:
                    self._changed.notify_all()

    async def _serve_now(self, prompt: int) -> T:
        """Return the result of a prompt, which keeps its turn while it waits for a quota. Raises BatonError."""
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
                if not has_waited:  # otherwise the quota is too small for a second one
                    self._num_at_once = min(self._num_at_once + 1, self._most_at_once)
                self._is_any_served = True
                return answer

    def _is_to_wait(self, error: Overloaded) -> bool:
        """Return whether to wait as long as a refusal says. While other prompts run it is better to wait for their end,
        as they return the part of the quota that they do not use."""
        is_quota = error.reason == TENANT_TOKENS and self._is_any_served and self._num_running == 1
        left_s = self._now().time_left_s
        return is_quota and (left_s is None or (error.retry_after_s or 0.0) < left_s)

    def _now(self) -> CallContext:
        return self._context.after(now() - self._begun_at)
