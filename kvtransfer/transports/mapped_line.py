"""A Line whose source shares its memory first, in one Mapping; the taker reads by itself what is Ready."""

from baton.v1 import kv_pb2
from kvtransfer.transports.socket_line import SocketLine


class MappedLine(SocketLine):
    """The taker's side."""

    async def receive(self) -> kv_pb2.KVFrame:
        """Return the next frame that is the caller's: a Mapping is for this line alone."""
        frame = await super().receive()
        if frame.WhichOneof("kind") == "mapping":
            await self._map(frame.mapping)
            frame = await super().receive()
        return frame

    async def _map(self, mapping: kv_pb2.Mapping) -> None:
        """Make the source's memory readable. Raises ProtocolError, also for a second Mapping; PeerLost or
        TransportBroken where it cannot be."""
        raise NotImplementedError
