"""Hold ports for processes that are started again at the same address."""

import socket


class PortError(Exception):
    """One line: why the address cannot be listened on."""


class HeldPorts:
    """Ports that stay ours between two lives of the processes that listen there."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def hold(self, address: str) -> str:
        """Return HOST:PORT with its port number (0: the system chooses). A bound socket that never listens keeps the port, and still
        lets a process listen on it. Raises PortError."""
        host, colon, port = address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise PortError(f"{address!r} is not HOST:PORT")
        try:
            family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
                probe.listen(1)
                where = probe.getsockname()
            held = socket.socket(family, kind)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(where)
        except OSError as error:
            raise PortError(f"cannot listen on {address}: {error.strerror}") from None
        self._held[f"{host}:{where[1]}"] = held
        return f"{host}:{where[1]}"

    def release(self, address: str) -> None:
        self._held.pop(address).close()

    def release_all(self) -> None:
        for address in [*self._held]:
            self.release(address)
