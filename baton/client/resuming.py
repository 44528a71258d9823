"""What a client has received of a stream, and the request for the rest."""

import secrets
import uuid

from baton.client.errors import CallError
from baton.client.retries import Attempts
from baton.v1 import inference_pb2 as pb


def make_resumable(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return a copy with a request_id and a seed, drawn here if absent: a lost gateway would have drawn them. A request
    that continues an answer must have those of that answer, so none are drawn for it."""
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
    """The tokens of one answer that have arrived, over all its streams."""

    def __init__(self, request: pb.GenerateRequest):
        """Start with nothing received. `request` must be resumable."""
        self._request = request
        num_choices = request.sampling.n if request.sampling.HasField("n") else 1
        self._num_tokens = list(request.resume_from) or [0] * num_choices
        self._ended = [False] * len(self._num_tokens)
        self._begun = False

    def rest(self) -> pb.GenerateRequest:
        """Return the request for the tokens that have not arrived."""
        rest = pb.GenerateRequest()
        rest.CopyFrom(self._request)
        del rest.resume_from[:]
        rest.resume_from.extend(self._num_tokens)
        return rest

    def may_go_on(self, error: CallError) -> bool:
        """Return whether the rest may follow what has arrived. It may not once the gateway reports that its
        continuation DIVERGED: it would compute another answer and skip as many of its tokens."""
        return error.reason != "DIVERGED" or not any(self._num_tokens)

    def take(self, message: pb.GenerateResponse, is_resumed: bool) -> bool:
        """Count a message; return whether the caller should get it. A resumed stream repeats the fields of the first
        message and the ends of choices, which are removed here."""
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


class ResumingStream:
    """What the blocking and the asyncio stream share: the tokens that have arrived, and when the rest is requested."""

    def __init__(self, request: pb.GenerateRequest, attempts: Attempts, resumes: bool):
        self._attempts = attempts
        self._request = make_resumable(request) if resumes else request
        self._received = Received(self._request) if resumes else None

    @property
    def request_id(self) -> str:
        """The id of the request; empty if the gateway draws it."""
        return self._request.request_id

    @property
    def num_resumed(self) -> int:
        """How often the stream broke and was resumed."""
        return self._attempts.num - 1

    def _take(self, message: pb.GenerateResponse) -> bool:
        """Count a message; return whether the caller should get it."""
        if self._received is None:
            return True
        self._attempts.progressed()
        return self._received.take(message, is_resumed=self._attempts.num > 1)

    def _rest_after(self, error: CallError) -> tuple[pb.GenerateRequest, float]:
        """Return the request for the rest, and the pause before it. Raises `error` if a retry cannot help."""
        pause_s = self._attempts.pause_s(error)
        if self._received is None or not self._received.may_go_on(error):
            raise error
        return self._received.rest(), pause_s
