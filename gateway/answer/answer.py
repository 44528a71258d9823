"""The stream that a client receives: messages of all choices in order, usage and timing on the last."""

import math
from collections.abc import Awaitable, Callable, Sequence

from baton.service.clock import now
from baton.service.errors import InvalidRequest
from baton.v1 import inference_pb2 as pb
from gateway.answer.answer_planner import AnswerPlan
from gateway.answer.choice import LENGTH, Choice
from gateway.answer.stop_strings import StopStrings
from gateway.request.bottlenecks import seconds_by_bottleneck
from gateway.request.timing import Measured, Stamps, timing
from gateway.request.validation import ValidatedRequest

SLOW_WRITE_S = 0.05  # a longer write waited for the client, whose HTTP/2 window is full, or for this event loop

Emit = Callable[[pb.GenerateResponse], Awaitable[None]]


class Diverged(Exception):
    """The tokens of another attempt do not repeat or continue those that the client has."""


class Answer:
    """Take tokens as they come with `push`, send messages with `flush`, and hold the last one for `finish`."""

    __slots__ = (
        "_validated",
        "_stamps",
        "_emit",
        "_on_gap",
        "_num_prompt_tokens",
        "_max_tokens",
        "_interval_s",
        "_num_flushes",
        "_num_sent",
        "num_slow_writes",
        "slow_writes_s",
        "prompt",
        "_prompt_logprobs",
        "choices",
    )

    def __init__(
        self,
        validated: ValidatedRequest,
        num_prompt_tokens: int,
        max_tokens: int,
        plan: AnswerPlan,
        stamps: Stamps,
        emit: Emit,
        on_gap: Callable[[float], None],
    ):
        """`max_tokens`: the longest that a choice may be. `on_gap(gap_s)` is called for each message of a choice after
        its first, with the time since the previous message divided by the number of its tokens."""
        self._validated, self._stamps, self._emit, self._on_gap = validated, stamps, emit, on_gap
        self._num_prompt_tokens, self._max_tokens = num_prompt_tokens, max_tokens
        self._interval_s = validated.stream_interval_s
        self._num_flushes = 0
        self._num_sent = 0
        self.num_slow_writes, self.slow_writes_s = 0, 0.0  # their number, and their time in all
        self.prompt: pb.EchoedPrompt | None = None  # for the first message
        self._prompt_logprobs: Sequence[pb.Logprobs] = ()  # for the first message too
        stops = StopStrings(validated.stops, plan.spellings) if validated.stops else None
        ends = None if validated.constraint is None else validated.stop_token_ids
        self.choices = [
            Choice(index, plan, stops, validated.min_tokens, num_received, validated.request_id, ends)
            for index, num_received in enumerate(validated.resume_from or [0] * validated.num_choices)
        ]

    @property
    def is_finished(self) -> bool:
        """Return whether every choice is finished."""
        for choice in self.choices:
            if not choice.finish_reason:
                return False
        return True

    @property
    def key_id(self) -> str:
        """The request's name among workers."""
        return self._validated.key_id

    @property
    def ended_here(self) -> bool:
        """Return whether a stop string or a call has ended a choice, which its worker does not notice."""
        return any(choice.ended_here for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        """Return whether any choice has a token."""
        return any(choice.token_ids for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons of the choices that are finished: stop | length | tool_calls."""
        reasons = (choice.finish_reason for choice in self.choices if choice.is_finished)
        return [pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() for reason in reasons]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_longest(self) -> int:
        """Tokens of the longest choice."""
        return max(len(choice.token_ids) for choice in self.choices)

    def push(
        self,
        index: int,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.Logprobs],
        finish_reason: int,
    ) -> None:
        """Add tokens of choice `index`, the first of which has output index `first_index`. Raises Diverged if they
        differ from known ones or leave a gap, InvalidRequest if the client claims more tokens than a choice has."""
        if index >= len(self.choices):
            raise Diverged(f"choice {index} was not asked for")
        choice = self.choices[index]
        if choice.is_finished:
            return
        if finish_reason == LENGTH and first_index + len(token_ids) < self._max_tokens:
            finish_reason = 0  # the worker ran out of room: another worker continues
        num_known = len(choice.token_ids) - first_index
        if num_known < 0:
            raise Diverged(f"choice {index}: token {len(choice.token_ids)} is missing")
        if num_known:
            known = choice.token_ids[first_index : first_index + len(token_ids)]
            if list(known) != list(token_ids[:num_known]):
                raise Diverged(f"choice {index}: another worker continues it differently")
            token_ids, logprobs = token_ids[num_known:], logprobs[num_known:]
        if token_ids:
            choice.push(token_ids, logprobs, finish_reason)
        if choice.is_finished and choice.num_received > (num_tokens := len(choice.token_ids)):
            where = f"resume_from[{index}]"
            raise InvalidRequest(where, f"is {choice.num_received}, and this choice ends after {num_tokens} tokens")

    def set_prompt_logprobs(self, logprobs: Sequence[pb.Logprobs]) -> None:
        """Keep the log-probabilities of the prompt for the first message, if the request asks for them. Raises
        Diverged if some are missing."""
        if self.has_begun or not self._validated.asks_for_prompt_logprobs:
            return
        if len(logprobs) != self._num_prompt_tokens - 1:
            given = f"{len(logprobs)} prompt_logprobs for a prompt of {self._num_prompt_tokens} tokens"
            raise Diverged(f"a worker gave {given}")
        self._prompt_logprobs = logprobs

    @property
    def due_at(self) -> float:
        """Return when to send the tokens that the stream interval holds back (time.monotonic()); inf if there are none
        or all choices are finished, as `finish` sends the last message."""
        if not self._interval_s or self.is_finished:
            return math.inf
        held = (choice.sent_at for choice in self.choices if choice.has_pending and choice.sent_at is not None)
        return min(held, default=math.inf) + self._interval_s

    @property
    def has_due(self) -> bool:
        """Return whether `flush` has something to send."""
        return bool(self._due())

    async def flush(self) -> None:
        """Send a message for each choice that is due; the last one of a finished answer is left to `finish`."""
        pending = self._due()
        if not pending:
            return
        self._num_flushes += 1
        if self.is_finished:
            pending.pop()
        for choice in pending:
            await self._send(choice, self._stamp())

    async def finish(self, num_cached_tokens: int, measured: Measured) -> None:
        """Send the last message, once every choice is finished."""
        last = next(choice for choice in reversed(self.choices) if choice.has_pending)
        at = self._stamp()
        usage = pb.Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=num_cached_tokens,
            output_tokens=self.num_output_tokens,
            draft_tokens=sum(measured.decode.proposed_by_position),
            accepted_tokens=sum(measured.decode.accepted_by_position),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )
        durations = timing(self._stamps, measured, self.num_longest)
        durations.bound_s.update(seconds_by_bottleneck(self._stamps, measured))
        await self._send(last, at, usage, durations)

    def _due(self) -> list[Choice]:
        """Return the choices that have something to send which the stream interval does not hold back."""
        pending = [choice for choice in self.choices if choice.has_pending]
        if self._interval_s:
            latest = now() - self._interval_s
            pending = [choice for choice in pending if choice.is_due(latest)]
        return pending

    def _add_head(self, message: pb.GenerateResponse) -> None:
        """Add the fields of the first message, and drop what was kept of the prompt for it."""
        message.seed = self._validated.seed
        message.request_id = self._validated.request_id
        message.prompt_tokens = self._num_prompt_tokens
        if self.prompt is not None:
            message.prompt.CopyFrom(self.prompt)
        message.prompt_logprobs.extend(self._prompt_logprobs)
        self.prompt, self._prompt_logprobs = None, ()

    def _stamp(self) -> float:
        stamps, at = self._stamps, now()
        if stamps.first_sent is None:
            stamps.first_sent = at
        elif stamps.second_sent is None and self._num_flushes > 1:
            stamps.second_sent = at
        stamps.last_sent = at
        return at

    async def _send(
        self, choice: Choice, at: float, usage: pb.Usage | None = None, durations: pb.Timing | None = None
    ) -> None:
        """Send the pending messages of a choice, which count as sent at `at` (time.monotonic())."""
        separate = choice.take_separate() if choice.separate else ()
        num_tokens, message = choice.num_pending, choice.take()
        for each in separate:
            num_tokens += len(each.token_ids)
        if self._num_sent == 0:
            self._add_head(separate[0] if separate else message)
        self._num_sent += 1
        if usage is not None:
            message.usage.CopyFrom(usage)
        if durations is not None:
            message.timing.CopyFrom(durations)
        if choice.sent_at is not None and num_tokens:
            self._on_gap((at - choice.sent_at) / num_tokens)
        choice.sent_at = at
        for each in separate:
            await self._emit(each)
        await self._emit(message)
        if (took_s := now() - at) > SLOW_WRITE_S:
            self.num_slow_writes += 1
            self.slow_writes_s += took_s
