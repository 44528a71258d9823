"""Find workers behind a DNS name: each of its addresses is one. Containers of a scaled service share a name, and come
and go while gateways run."""

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from baton.addresses import split_address
from baton.service.logs import fields
from gateway.discovery.session_set import SessionSet

RESOLVE_S = 3.0  # between two looks, and the longest that one takes

log = logging.getLogger(__name__)


def is_name(address: str) -> bool:
    """Return whether the host of HOST:PORT has to be looked up."""
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return True
    return False


async def addresses_of(host: str, port: str) -> list[str]:
    """Return HOST:PORT for every address of a name. IPv6 addresses are left out where there are others, since a worker
    with both is one worker. Raises OSError."""
    looked: Future[list[tuple]] = Future()
    looked.set_running_or_notify_cancel()
    # What waits for the DNS cannot be ended. It would keep one of the four threads that all look-ups of uvloop share,
    # or of asyncio's own, and both wait for theirs at the end of the process.
    looking = threading.Thread(target=_look_up, args=(host, port, looked), name="dns", daemon=True)
    try:
        looking.start()
    except RuntimeError as error:  # the system has no thread left now
        raise OSError(errno.EAGAIN, str(error)) from None
    found = await asyncio.wrap_future(looked)
    v4 = {f"{where[0]}:{where[1]}" for family, _, _, _, where in found if family == socket.AF_INET}
    return sorted(v4 or {f"[{where[0]}]:{where[1]}" for family, _, _, _, where in found})


def _look_up(host: str, port: str, looked: Future[list[tuple]]) -> None:
    try:
        looked.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as error:
        looked.set_exception(error)


class Resolver:
    """Looks up several names at once, and none of them twice at a time: one whose DNS is silent holds up itself
    alone."""

    def __init__(self, most: int):
        """`most`: names at once."""
        self._most = most
        self._running: dict[tuple[str, str], asyncio.Task[list[str]]] = {}

    async def resolve(self, host: str, port: str) -> list[str]:
        """Return what `addresses_of` does. Raises OSError, also after RESOLVE_S: the look-up goes on, and the next call
        waits for that one."""
        name = host, port
        if name not in self._running:
            if len(self._running) >= self._most:
                raise OSError(errno.EAGAIN, f"{self._most} other names wait for the DNS")
            self._running[name] = looking = asyncio.create_task(addresses_of(host, port))
            looking.add_done_callback(partial(self._end, name))
        try:
            async with asyncio.timeout(RESOLVE_S):
                return await asyncio.shield(self._running[name])
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "no answer from the DNS") from None

    def _end(self, name: tuple[str, str], looking: asyncio.Task[list[str]]) -> None:
        del self._running[name]
        _ = looking.cancelled() or looking.exception()  # else asyncio logs one whose callers had all gone


class DnsWorkers:
    """Keep sessions with the workers behind one configured HOST:PORT whose host is a name."""

    def __init__(self, address: str, role: str, sessions: SessionSet):
        self.address, self.role, self._sessions = address, role, sessions
        self._resolver = Resolver(1)
        self.reason = "not looked up yet"  # why it has no addresses; empty once it has

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Look the name up again and again, with a session for each address in tasks of `group`; until cancelled."""
        while True:
            host, port = split_address(self.address)
            try:
                addresses, self.reason = await self._resolver.resolve(host, str(port)), ""
            except OSError as error:
                self._note(error.strerror or str(error))
            else:
                self._sessions.keep(addresses, group)
            on_change()
            await asyncio.sleep(RESOLVE_S)

    def _note(self, reason: str) -> None:
        """Keep the reason; sessions stay as they are, since a failed look-up says nothing of the workers."""
        if reason != self.reason:
            log.warning("workers not found %s", fields(name=self.address, reason=reason))
        self.reason = reason
