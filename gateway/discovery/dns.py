"""Find workers behind a DNS name: each of its addresses is one. Containers of a scaled service share a name, and come
and go while gateways run."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable

from baton.service.logs import fields
from gateway.discovery.session_set import SessionSet

RESOLVE_S = 3.0  # between two looks, and the longest that one takes

log = logging.getLogger(__name__)


def is_name(address: str) -> bool:
    """Return whether the host of HOST:PORT has to be looked up."""
    try:
        ipaddress.ip_address(_split(address)[0])
    except ValueError:
        return True
    return False


async def addresses_of(host: str, port: str) -> list[str]:
    """Return HOST:PORT for every address of a name. IPv6 addresses are left out where there are others, since a worker
    with both is one worker. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = {f"{where[0]}:{where[1]}" for family, _, _, _, where in found if family == socket.AF_INET}
    return sorted(v4 or {f"[{where[0]}]:{where[1]}" for family, _, _, _, where in found})


class DnsWorkers:
    """Keep sessions with the workers behind one configured HOST:PORT whose host is a name."""

    def __init__(self, address: str, role: str, sessions: SessionSet):
        self.address, self.role, self._sessions = address, role, sessions
        self.reason = "not looked up yet"  # why it has no addresses; empty once it has

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Look the name up again and again, with a session for each address in tasks of `group`; until cancelled."""
        while True:
            try:
                async with asyncio.timeout(RESOLVE_S):
                    addresses, self.reason = await addresses_of(*_split(self.address)), ""
            except (OSError, TimeoutError) as error:
                self._note(getattr(error, "strerror", None) or "no answer from the DNS")
            else:
                self._sessions.keep(addresses, group)
            on_change()
            await asyncio.sleep(RESOLVE_S)

    def _note(self, reason: str) -> None:
        """Keep the reason; sessions stay as they are, since a failed look-up says nothing of the workers."""
        if reason != self.reason:
            log.warning("workers not found %s", fields(name=self.address, reason=reason))
        self.reason = reason


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port
