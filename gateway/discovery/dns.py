"""Find workers behind a DNS name: each address of the name is one worker.

Containers of a scaled service share a name, and come and go while gateways run."""

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

RESOLVE_S = 3.0  # between two look-ups, and the longest wait for one

log = logging.getLogger(__name__)


def is_name(address: str) -> bool:
    """Return whether the host of HOST:PORT has to be looked up."""
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return True
    return False


async def addresses_of(host: str, port: str) -> list[str]:
    """Return HOST:PORT for every address of a name. Raises OSError.

    IPv6 addresses are left out if the name has IPv4 addresses, since a worker with both is one worker."""
    looked: Future[list[tuple]] = Future()
    looked.set_running_or_notify_cancel()
    # A look-up cannot be cancelled. In a thread of uvloop's pool of four, or of asyncio's, it would hold up other
    # look-ups, and the end of the process, which waits for the threads of both pools.
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
    """Look up several names at the same time, each of them once at a time, so that a name whose DNS server is silent
    does not hold up others."""

    def __init__(self, most: int):
        """`most`: how many names are looked up at the same time."""
        self._most = most
        self._running: dict[tuple[str, str], asyncio.Task[list[str]]] = {}

    async def resolve(self, host: str, port: str) -> list[str]:
        """Return HOST:PORT for every address of a name. Raises OSError, also after RESOLVE_S without an answer.

        The look-up then continues, and the next call for the name waits for the same one."""
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
        _ = looking.cancelled() or looking.exception()  # read, since asyncio logs an exception that nobody has read


class DnsWorkers:
    """Keep sessions with the workers behind one configured HOST:PORT whose host is a name."""

    def __init__(self, address: str, role: str, sessions: SessionSet):
        self.address, self.role, self._sessions = address, role, sessions
        self._resolver = Resolver(1)
        self.reason = "not looked up yet"  # why the name has no addresses; empty after a look-up that succeeded

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Look the name up every RESOLVE_S, and keep a session with each address, in tasks of `group`, until
        cancelled."""
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
        """Keep and log the reason of a failed look-up; sessions stay as they are, since it says nothing of workers."""
        if reason != self.reason:
            log.warning("workers not found %s", fields(name=self.address, reason=reason))
        self.reason = reason
