"""What an answer of each API has to say, and what their writers have in common."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from baton.v1 import inference_pb2 as pb
from gateway.http.wire.encoding import Data, Json

_LEAST_LOGPROB = -9999.0


class SequenceDecoder(Protocol):
    """The text of one sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain now and was not before."""
        ...


class TokenTexts(Protocol):
    """What the tokens of a model say."""

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """Return a token as it is shown alone, and the bytes that it stands for."""
        ...

    def decoder(self, continues: bool = False) -> SequenceDecoder:
        """Return a decoder for one sequence; `continues`: it goes on with a text that stands before it."""
        ...

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of the first tokens has text."""
        ...


def logprob_in_json(logprob: float) -> float:
    """Return a log-probability as JSON can have it, which has no infinity and no NaN."""
    return max(_LEAST_LOGPROB, logprob)  # the first one, where the other is NaN


def token_logprobs(logprobs: Iterable[pb.Logprobs], tokens: TokenTexts) -> Iterator[Json]:
    """Yield the tokens of a part of an answer, each with its alternatives."""

    def token_json(token: pb.TokenLogprob) -> Json:
        text, raw = tokens.shown(token.token_id)
        return {"token": text, "logprob": logprob_in_json(token.logprob), "bytes": list(raw)}

    return ({**token_json(each.chosen), "top_logprobs": [token_json(best) for best in each.top]} for each in logprobs)


class EventWriter(Protocol):
    """What the events of an answer look like. `ping`: what says nothing."""

    ping: bytes

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the events for a message to the prompt of that number; empty, where it says nothing here."""
        ...

    def tail(self, usages: Iterable[pb.Usage]) -> Data:
        """Return the last events."""
        ...

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with."""
        ...


class AnswerWriter(EventWriter, Protocol):
    """What an answer looks like."""

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns`."""
        ...


def split_parts(message: pb.GenerateResponse) -> tuple[str, list[pb.ToolCall]]:
    """Return the arguments that belong to the call before, whose place is before the message's text, and the others."""
    parts = list(message.tool_calls)
    return (parts[0].arguments, parts[1:]) if parts and not parts[0].name else ("", parts)
