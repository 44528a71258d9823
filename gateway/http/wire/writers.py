"""Protocols of the writers of answers, and functions that they share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from baton.v1 import inference_pb2 as pb
from gateway.http.wire.encoding import Data, Json

_LEAST_LOGPROB = -9999.0


class SequenceDecoder(Protocol):
    """Decode one sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        ...


class TokenTexts(Protocol):
    """The texts of a model's tokens."""

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """Return the text of a token by itself, and the bytes that it stands for."""
        ...

    def decoder(self, continues: bool = False) -> SequenceDecoder:
        """Return a decoder for one sequence; `continues`: the sequence continues another text."""
        ...

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of the first tokens has text."""
        ...


def logprob_in_json(logprob: float) -> float:
    """Return a log-probability without infinity and NaN, which JSON does not have."""
    return max(_LEAST_LOGPROB, logprob)  # max returns the first one if the other is NaN


def token_logprobs(logprobs: Iterable[pb.Logprobs], tokens: TokenTexts) -> Iterator[Json]:
    """Yield the tokens of a part of an answer, each with its logprob and its alternatives."""

    def token_json(token: pb.TokenLogprob) -> Json:
        text, raw = tokens.shown(token.token_id)
        return {"token": text, "logprob": logprob_in_json(token.logprob), "bytes": list(raw)}

    return ({**token_json(each.chosen), "top_logprobs": [token_json(best) for best in each.top]} for each in logprobs)


class EventWriter(Protocol):
    """Write the events of an answer. `ping`: an event without content."""

    ping: bytes

    def chunk(self, prompt: int, message: pb.GenerateResponse) -> Data:
        """Return the events for a message to this prompt; empty if there is nothing to send."""
        ...

    def tail(self, usages: Iterable[pb.Usage]) -> Data:
        """Return the last events."""
        ...

    def error_event(self, error: Json) -> bytes:
        """Return the event that an error ends a stream with."""
        ...


class AnswerWriter(EventWriter, Protocol):
    """Write an answer as events or as one object."""

    def whole(self, responses: list[pb.CompleteResponse]) -> Json:
        """Return the answer in one object, for `to_bytes_in_turns`."""
        ...


def split_parts(message: pb.GenerateResponse) -> tuple[str, list[pb.ToolCall]]:
    """Return arguments that continue the previous call, which come before the message's text, and the new calls."""
    parts = list(message.tool_calls)
    return (parts[0].arguments, parts[1:]) if parts and not parts[0].name else ("", parts)
