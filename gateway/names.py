"""Workers behind a name: each address that it has in the DNS is one of them. Containers of a scaled service share a
name, and come and go while gateways run."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable

from baton.service.logs import fields
from gateway.workers import LinkState, WorkerLink

RESOLVE_S = 3.0  # between two looks, and the longest that one takes

log = logging.getLogger(__name__)


def is_name(address: str) -> bool:
    """Whether the host of HOST:PORT is to be looked up."""
    try:
        ipaddress.ip_address(_split(address)[0])
    except ValueError:
        return True
    return False


async def addresses_of(host: str, port: str) -> list[str]:
    """HOST:PORT of every address of a name; those of IPv6 only where there are no others, since a worker with both is
    one worker. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    v4 = {f"{where[0]}:{where[1]}" for family, _, _, _, where in found if family == socket.AF_INET}
    return sorted(v4 or {f"[{where[0]}]:{where[1]}" for family, _, _, _, where in found})


class WorkerName:
    """One configured HOST:PORT whose host is a name. `links` is the role's list, which links join and leave."""

    def __init__(self, address: str, links: list[WorkerLink], make_link: Callable[[str], WorkerLink]):
        self.address = address
        self.reason = "not looked up yet"  # why it has no addresses; empty once it has
        self._links, self._make_link = links, make_link
        self._own: dict[WorkerLink, asyncio.Task] = {}

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Keeps a session with every address, in tasks of `group`; until cancelled."""
        while True:
            try:
                async with asyncio.timeout(RESOLVE_S):
                    addresses, self.reason = await addresses_of(*_split(self.address)), ""
            except (OSError, TimeoutError) as error:
                self._note(getattr(error, "strerror", None) or "no answer from the DNS")
            else:
                self._join(addresses, group)
                self._leave(addresses)
            on_change()
            await asyncio.sleep(RESOLVE_S)

    def is_of(self, links: list[WorkerLink]) -> bool:
        """Whether its workers stand in this list."""
        return self._links is links

    def _join(self, addresses: list[str], group: asyncio.TaskGroup) -> None:
        known = {link.address for link in self._links}
        for address in addresses:
            if address not in known:
                link = self._make_link(address)
                self._links.append(link)
                self._own[link] = group.create_task(link.run(), name=f"link {address}")

    def _leave(self, addresses: list[str]) -> None:
        """What the name has lost goes once its session has ended: a DNS that forgets for a moment ends nothing."""
        for link in [link for link in self._own if link.address not in addresses]:
            if link.state in (LinkState.CONNECTING, LinkState.REFUSED):
                self._own.pop(link).cancel()
                self._links.remove(link)

    def _note(self, reason: str) -> None:
        """Links stay as they are: a name that is not found for a moment says nothing of the workers."""
        if reason != self.reason:
            log.warning("workers not found %s", fields(name=self.address, reason=reason))
        self.reason = reason


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port
