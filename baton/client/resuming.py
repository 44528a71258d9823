"""What a client has of a stream, and the request that continues behind it."""

import secrets
import uuid

from baton.client.errors import CallError
from baton.v1 import inference_pb2 as pb


def make_resumable(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return a copy with a request_id and a seed of our own where there are none: what a lost gateway would have drawn.
    A request that continues an answer needs those of that answer, and others would hide that they are missing."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    if request.resume_from:
        return copy
    if not copy.request_id:
        copy.request_id = uuid.uuid4().hex
    if not copy.sampling.HasField("seed"):
        copy.sampling.seed = secrets.randbits(64)
    return copy


class Received:
    """The tokens of one answer that have come, over all its streams."""

    def __init__(self, request: pb.GenerateRequest):
        """`request`: resumable."""
        self._request = request
        num_choices = request.sampling.n if request.sampling.HasField("n") else 1
        self._num_tokens = list(request.resume_from) or [0] * num_choices
        self._ended = [False] * len(self._num_tokens)
        self._begun = False

    def rest(self) -> pb.GenerateRequest:
        """Return the request for what has not come yet."""
        rest = pb.GenerateRequest()
        rest.CopyFrom(self._request)
        del rest.resume_from[:]
        rest.resume_from.extend(self._num_tokens)
        return rest

    def may_go_on(self, error: CallError) -> bool:
        """Return whether the rest may follow what has come: not once the gateway could not continue the answer alike. It would
        compute another one, and leave out as many of its tokens."""
        return error.reason != "DIVERGED" or not any(self._num_tokens)

    def take(self, message: pb.GenerateResponse, is_resumed: bool) -> bool:
        """Count a message; return whether it is for the caller. A resumed stream repeats the ends of
        choices, and what is on the first message."""
        index = message.index
        if index >= len(self._num_tokens):
            return True
        self._num_tokens[index] += len(message.token_ids)
        if is_resumed and self._begun:
            for name in ("seed", "request_id", "prompt_tokens"):
                message.ClearField(name)
        if is_resumed and self._ended[index]:
            message.ClearField("finish_reason")
            message.ClearField("matched_stop")
            return message.HasField("usage")
        self._begun = True
        self._ended[index] = self._ended[index] or message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        return True
