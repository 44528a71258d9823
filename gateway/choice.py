"""One choice of an answer: its tokens become text, stop strings end it."""

from collections.abc import Sequence

from baton.v1 import inference_pb2 as pb
from gateway.detokenizer import Detokenizer, StopMatcher

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


class Choice:
    """Fed with tokens in order; `take()` gives the message that may go out now."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, num_received: int = 0
    ):
        """`num_received`: tokens that the client has from before, which are read and not sent again."""
        self.index = index
        self.num_received = num_received
        self.token_ids: list[int] = []
        self.finish_reason = 0
        self.ended_here = False  # by a stop string: the worker does not know
        self._decoder = detokenizer.decoder()
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._pending = pb.GenerateResponse(index=index)

    @property
    def finished(self) -> bool:
        return self.finish_reason != 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending.token_ids) or self._pending.finish_reason != 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[pb.Logprobs], finish_reason: int) -> None:
        """Tokens behind those that are there; after the end of the choice they are dropped."""
        last = len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            if self.finished:
                return
            ended = finish_reason if position == last else 0
            self._push(token_id, ended)
            if logprobs and len(self.token_ids) > self.num_received:
                self._pending.logprobs.append(logprobs[position])

    def take(self) -> pb.GenerateResponse:
        """What has come since the last time."""
        message, self._pending = self._pending, pb.GenerateResponse(index=self.index)
        return message

    def _push(self, token_id: int, ended: int) -> None:
        self.token_ids.append(token_id)
        is_new = len(self.token_ids) > self.num_received
        if is_new:
            self._pending.token_ids.append(token_id)
        # A token that stops the choice is no part of its text.
        piece = "" if ended == STOP else self._decoder.push(token_id)
        if ended:
            piece += self._decoder.finish()
        self._say(piece)
        if ended and not self.finished:
            self._pending.text += self._stops.finish()
            self._finish(ended)
        if not is_new:
            self._pending.text = ""  # that came with the token

    def _say(self, piece: str) -> None:
        if len(self.token_ids) <= self._min_tokens:
            self._pending.text += piece
            return
        text, matched = self._stops.push(piece)
        self._pending.text += text
        if matched is not None:
            self._pending.matched_stop = matched
            self.ended_here = True
            self._finish(STOP)

    def _finish(self, reason: int) -> None:
        self.finish_reason = self._pending.finish_reason = reason
