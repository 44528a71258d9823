"""Connect to a source that shares its memory in one Mapping frame; the taker then reads the ranges that are ready by
itself."""

from baton.v1 import kv_pb2
from kvtransfer.transports.socket_connection import SocketConnection


class MappedConnection(SocketConnection):
    """The taker's side of a connection whose source shares its memory."""

    async def receive(self) -> kv_pb2.KVFrame:
        """Return the next frame other than a Mapping, which is handled here."""
        frame = await super().receive()
        if frame.WhichOneof("kind") == "mapping":
            await self._map(frame.mapping)
            frame = await super().receive()
        return frame

    async def _map(self, mapping: kv_pb2.Mapping) -> None:
        """Make the source's memory readable. Raises ProtocolError, also for a second Mapping; PeerLost or
        TransportBroken if it cannot be made readable."""
        raise NotImplementedError
