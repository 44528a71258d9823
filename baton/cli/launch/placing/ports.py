"""Hold ports for processes that are restarted at the same address."""

import socket

from baton.service.net.server import ListenError, listening_socket


class PortError(Exception):
    """The address cannot be bound; one line with the reason."""


class HeldPorts:
    """Ports that stay reserved between two runs of the processes that listen there."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def hold(self, address: str) -> str:
        """Return HOST:PORT with its port number (port 0: the system chooses). A bound socket that never listens
        reserves the port, and still lets a process listen on it. Raises PortError."""
        try:
            with listening_socket(address) as probe:
                where = probe.getsockname()
            held = socket.socket(probe.family, probe.type)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(where)
        except ListenError as error:
            raise PortError(str(error)) from None
        except OSError as error:
            raise PortError(f"cannot listen on {address}: {error.strerror}") from None
        found = f"{address.rpartition(':')[0]}:{where[1]}"
        self._held[found] = held
        return found

    def release(self, address: str) -> None:
        self._held.pop(address).close()

    def release_all(self) -> None:
        for address in [*self._held]:
            self.release(address)
