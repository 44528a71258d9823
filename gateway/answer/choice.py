"""One choice of an answer: its tokens become text, and stop strings end it."""

from array import array
from collections.abc import Sequence, Set
from itertools import chain

from baton.v1 import inference_pb2 as pb
from gateway.answer.answer_planner import AnswerPlan
from gateway.answer.stop_strings import StopMatcher, StopStrings
from gateway.answer.tool_calls import ToolCalls
from gateway.parsers.answer_parser import Parsed
from gateway.text.detokenizer import TextDecoder

_NOTHING = (False, False, False)  # whether tokens add text, reasoning, parts of calls
STOP, LENGTH, TOOL_CALLS = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_TOOL_CALLS


class Choice:
    """Take tokens in order with `push`, and return the message to send now with `take`. When log-probabilities are
    requested, a message carries tokens of one kind only (text, reasoning or call), and tokens that add nothing go with
    the next ones that do, so that a client can attribute each log-probability; other messages wait in `separate`."""

    __slots__ = (
        "index",
        "num_received",
        "token_ids",
        "finish_reason",
        "ended_here",
        "sent_at",
        "num_pending",
        "_decoder",
        "_stops",
        "_min_tokens",
        "_text",
        "_logprobs",
        "_matched_stop",
        "_parser",
        "_reasoning",
        "_detokenizer",
        "_keeps_space",
        "_calls",
        "_streams_arguments",
        "_request_id",
        "_ends_with_call",
        "_stop_token_ids",
        "_kinds",
        "separate",
    )

    def __init__(
        self,
        index: int,
        plan: AnswerPlan,
        stops: StopStrings | None,
        min_tokens: int,
        num_received: int = 0,
        request_id: str = "",
        stop_token_ids: Set[int] | None = None,
    ):
        """`num_received`: tokens that the client has from an earlier stream, which are parsed but not sent again.
        `request_id`: the ids of calls derive from it. `stop_token_ids` None: only a stop token stops the choice, as
        there is no constraint whose completion would do so too."""
        self.index = index
        self.num_received = num_received
        self.token_ids = array("I")
        self.finish_reason = 0
        self.ended_here = False  # by a stop string or a call, which the worker does not notice
        self.sent_at: float | None = None  # when its last message was sent
        self.num_pending = 0  # the last tokens, which are not sent yet
        self.separate: list[pb.GenerateResponse] | None = None  # messages to send before the open one
        self._decoder: TextDecoder | None = plan.detokenizer.decoder(plan.keeps_space)  # None: its end was sent
        self._stops = StopMatcher(stops) if stops else None
        self._min_tokens, self._stop_token_ids = min_tokens, stop_token_ids
        self._text = ""
        self._logprobs: list[pb.Logprobs] | None = None
        self._matched_stop = ""
        self._parser = plan.new_parser and plan.new_parser()
        self._reasoning = ""
        self._detokenizer, self._keeps_space = plan.detokenizer, plan.keeps_space
        self._calls: ToolCalls | None = None  # None until a part of a call has come
        self._streams_arguments = plan.streams_arguments
        self._request_id, self._ends_with_call = request_id, plan.ends_with_call
        self._kinds = _NOTHING  # of the open message

    @property
    def is_finished(self) -> bool:
        """Return whether the choice has ended."""
        return self.finish_reason != 0

    @property
    def has_pending(self) -> bool:
        """Return whether tokens, or the end of the choice, wait to be sent."""
        return self.num_pending != 0 or (self.finish_reason != 0 and self._decoder is not None)

    def is_due(self, latest: float) -> bool:
        """Return whether to send what is pending: always for the first message and the last, otherwise if the previous
        one was sent by `latest` (time.monotonic())."""
        return self.sent_at is None or self.is_finished or self.sent_at <= latest

    @property
    def num_reasoning_tokens(self) -> int:
        """Return how many tokens begin within the reasoning, once the choice has ended. They are not counted earlier
        because the parser does not tell apart tokens that come together."""
        if self._parser is None:
            return 0
        ends = chain.from_iterable(self._parser.reasoning_spans)
        counts = self._detokenizer.num_begun(self.token_ids, ends, self._keeps_space)
        return sum(counts[1::2]) - sum(counts[::2])

    @property
    def _has_whole_call(self) -> bool:
        return self._calls is not None and self._calls.num_whole > 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs], finish_reason: int) -> None:
        """Append tokens; those after the end of the choice are dropped."""
        is_at_once = self._stops is None and not self._ends_with_call and not logprobs
        if is_at_once and len(self.token_ids) >= self.num_received:
            self._push(token_ids, logprobs, finish_reason)
            return
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            if self.is_finished:
                return
            self._push((token_id,), logprobs[position : position + 1], finish_reason if position == last else 0)

    def take(self) -> pb.GenerateResponse:
        """Return the message to send after those in `separate`, with everything since the last call."""
        message = self._message(len(self.token_ids))
        if self.finish_reason:
            message.finish_reason, message.matched_stop = self.finish_reason, self._matched_stop
            self._decoder = None
        return message

    def take_separate(self) -> list[pb.GenerateResponse]:
        """Return the messages to send before the one that `take` returns."""
        taken, self.separate = self.separate or [], None
        return taken

    def _message(self, end: int) -> pb.GenerateResponse:
        """Return the open message, with tokens up to output index `end`, and begin a new one."""
        message = pb.GenerateResponse()
        if self.index:
            message.index = self.index
        if self._text:
            message.text, self._text = self._text, ""
        if self._reasoning:
            message.reasoning, self._reasoning = self._reasoning, ""
        if self._calls is not None:
            message.tool_calls.extend(self._calls.take())
        if self.num_pending:
            message.token_ids.extend(self.token_ids[end - self.num_pending : end])
            self.num_pending = 0
        if self._logprobs:
            message.logprobs.extend(self._logprobs)
            self._logprobs, self._kinds = None, _NOTHING
        return message

    def _push(self, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs], ended: int) -> None:
        """Append these tokens; only one at a time if the choice may end before the last of several."""
        self.token_ids.extend(token_ids)
        is_new = len(self.token_ids) > self.num_received
        # The text does not include the token that stops the choice.
        is_stop = ended == STOP and (self._stop_token_ids is None or token_ids[-1] in self._stop_token_ids)
        piece = self._decoder.push(token_ids[:-1] if is_stop else token_ids)
        if ended:
            piece += self._decoder.finish()
        text = self._before_stop(piece)
        if ended and not self.is_finished:
            if self._stops is not None:
                text += self._stops.finish()
            self.finish_reason = ended
        if self._parser is not None or logprobs:
            found = self._parsed(text)
            if is_new and logprobs:
                self._open(found)
            text = self._keep(found, is_new)
        if is_new:
            self._text += text
            self.num_pending += len(token_ids)
            if logprobs:
                self._logprobs = self._logprobs or []
                self._logprobs += logprobs

    def _parsed(self, text: str) -> list[Parsed]:
        """Return what the parser has found for certain after this text."""
        if self._parser is None:
            return [Parsed(text)]
        found = [self._parser.push(text)]
        if self.finish_reason:
            found.append(self._parser.finish(self.finish_reason == STOP and not self._matched_stop))
        return found

    def _open(self, found: Sequence[Parsed]) -> None:
        """Begin a new message if the last token adds another kind of thing than the open one has."""
        kinds = tuple(any(getattr(each, name) for each in found) for name in ("content", "reasoning", "calls"))
        if self._kinds not in (_NOTHING, kinds):
            self.separate = self.separate or []
            self.separate.append(self._message(len(self.token_ids) - 1))
        self._kinds = kinds

    def _keep(self, found: Sequence[Parsed], is_new: bool) -> str:
        """Return the content; keep reasoning and calls if they are new, and end the choice if a call ends it."""
        content = ""
        for each in found:
            for part in each.calls:
                if not (self._has_whole_call and self._ends_with_call):
                    self._calls = self._calls or ToolCalls(f"{self._request_id}/{self.index}", self._streams_arguments)
                    self._calls.add(part, is_new)
            content += each.content
            if is_new:
                self._reasoning += each.reasoning
        if self._has_whole_call and self._ends_with_call and not self.finish_reason:
            self.ended_here, self.finish_reason = True, TOOL_CALLS
        elif self.finish_reason == STOP and self._has_whole_call and not self._matched_stop:
            self.finish_reason = TOOL_CALLS
        return content

    def _before_stop(self, piece: str) -> str:
        """Return the text that can be sent after `piece`; end the choice if a stop string is complete."""
        if self._stops is None:
            return piece
        text, matched = self._stops.push(piece, may_end=len(self.token_ids) > self._min_tokens)
        if matched is not None:
            self._matched_stop, self.ended_here, self.finish_reason = matched, True, STOP
        return text
