"""Hand a request over to its handler without keeping its prompt in memory while the answer is written."""

from baton.v1 import inference_pb2 as pb


class OwnedRequest:
    """A reference to a request that its handler takes. gRPC keeps a method's argument until its stream has ended, and
    so would keep the prompt."""

    __slots__ = ("_request",)

    def __init__(self, request: pb.GenerateRequest):
        self._request: pb.GenerateRequest | None = request

    @property
    def request(self) -> pb.GenerateRequest:
        """The request, which must not be taken or dropped yet."""
        assert self._request is not None
        return self._request

    def take(self) -> pb.GenerateRequest:
        """Return the request and keep no reference to it."""
        taken = self.request
        self._request = None
        return taken

    def drop(self) -> None:
        """Keep no reference to the request, if there still is one."""
        self._request = None

    def shared(self) -> "OwnedRequest":
        """Return another reference to the same request, which this one keeps too."""
        return OwnedRequest(self.request)
