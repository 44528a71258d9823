"""Find workers that have registered with this gateway or, through Redis, with another gateway of its stack."""

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Callable, Mapping, Set

from baton.addresses import AddressError, split_address
from baton.service.clock import now
from baton.service.errors import InvalidRequest, Overloaded
from baton.tasks import is_cancelled
from gateway.config.networks import Networks
from gateway.discovery.dial_policy import DialPolicy
from gateway.discovery.dns import Resolver, is_name
from gateway.discovery.session_set import SessionSet
from gateway.discovery.worker_directory import Entry, Worker, WorkerDirectory
from gateway.link.worker_link import WorkerLink

TTL_S = 10.0
MAX_WORKERS = 4096
_LOOK_S = 1.0
_MAX_RESOLVING = 128  # names that are looked up at the same time, in a thread for each
_OF_OTHERS = (
    "registered with gateways of another --model, or of an older version, on this Redis: gateways share those of one name "
    "and folder; give each stack a database of its own, or name this gateway in the workers' --gateways"
)

log = logging.getLogger(__name__)


class Registrations:
    """Keep sessions with registered workers.

    Workers are dialled only by IP addresses within `networks`, so that a name cannot resolve differently between the
    check and the call."""

    def __init__(
        self,
        members: Mapping[str, SessionSet],
        directory: WorkerDirectory,
        networks: Networks,
        stacks: Callable[[], Set[str]],
        stack_of: Callable[[WorkerLink], str],
    ):
        """`stacks()` returns the stacks of the models that are served here, `stack_of(link)` the stack of a worker's
        model, which is empty until the worker has said what it serves."""
        self._members, self._directory, self._networks = members, directory, networks
        self._stacks, self._stack_of = stacks, stack_of
        self._until: dict[Worker, float] = {}
        self._policy = DialPolicy()
        self._elsewhere: dict[Worker, bool] = {}  # worker of another gateway -> whether it may be dialled
        self._others: set[Worker] = set()  # workers of other stacks
        self._has_others_alone = False
        self._resolver = Resolver(_MAX_RESOLVING)
        self._has_new = asyncio.Event()

    async def note(self, role: str, address: str) -> None:
        """Keep this worker for TTL_S if its address may be dialled. Raises InvalidRequest and Overloaded."""
        try:
            worker = role, await self._resolved(address) if is_name(address) else _plain(address)
            self._check(*worker)
        except _Wrong as error:
            raise InvalidRequest(*error.args) from None
        if len(self._until) >= MAX_WORKERS and worker not in self._until:
            raise Overloaded(f"{MAX_WORKERS} workers are registered here already", TTL_S, reason="TOO_MANY_WORKERS")
        is_new = worker not in self._until
        self._until[worker] = now() + TTL_S
        if is_new:
            self._has_new.set()

    async def follow(self, group: asyncio.TaskGroup, on_change: Callable[[], None]) -> None:
        """Keep a session with each registered worker that is dialled, in tasks of `group`, until cancelled."""
        # The check is needed since a call to Redis may swallow the cancellation.
        while not is_cancelled():
            await self._look(group)
            on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._has_new.wait()
            self._has_new.clear()

    async def close(self) -> None:
        """Close the directory."""
        await self._directory.close()

    def excuses(self, role: str) -> list[str]:
        """Return why registered workers of this role are not dialled, a line for each reason."""
        num = sum(its_role == role for its_role, _ in self._others)
        return self._policy.excuses(role) + ([f"{num} {_OF_OTHERS}"] if num else [])

    async def _look(self, group: asyncio.TaskGroup) -> None:
        at = now()
        self._until = {worker: until for worker, until in self._until.items() if until > at}
        links = {(role, link.address): link for role, members in self._members.items() for link in members.links}
        entries = {worker: (*worker, stack) for worker, link in links.items() if (stack := self._stack_of(link))}
        here = {entries[worker]: until - at for worker, until in self._until.items() if worker in entries}
        known = [entries[worker] for worker in self._policy.proven if worker in entries]
        elsewhere = self._of_these_stacks(await self._directory.exchange(here, known))
        missed = {(role, link.address) for role, members in self._members.items() for link in members.missed}
        chosen = self._policy.choose(self._until.keys(), self._allowed(elsewhere), links, missed, at)
        for role, members in self._members.items():
            members.keep([address for its_role, address in chosen if its_role == role], group)

    def _of_these_stacks(self, found: set[Entry]) -> set[Worker]:
        """Return the workers of models that are served here; note the others, and log if there are only such."""
        stacks = self._stacks()
        named = {(role, address) for role, address, stack in found if stack in stacks}
        self._others = {(role, address) for role, address, _ in found} - named - self._until.keys()
        serves = any(link.is_serving for members in self._members.values() for link in members.links)
        has_others_alone = bool(self._others) and not named and not self._until and not serves
        if has_others_alone and not self._has_others_alone:
            log.warning("no worker is registered that serves here; %d %s", len(self._others), _OF_OTHERS)
        self._has_others_alone = has_others_alone
        return named

    def _allowed(self, found: set[Worker]) -> set[Worker]:
        """Return the workers of other gateways that may be dialled. Each is checked once while it is listed."""
        before = self._elsewhere
        self._elsewhere = {worker: before[worker] if worker in before else self._may_be(*worker) for worker in found}
        return {worker for worker, may_be in self._elsewhere.items() if may_be}

    def _may_be(self, role: str, address: str) -> bool:
        with contextlib.suppress(_Wrong):
            self._check(role, address)
            return _plain(address) == address
        return False

    def _check(self, role: str, address: str) -> None:
        """Raise _Wrong for a role or an address that is not allowed."""
        if role not in self._members:
            raise _Wrong("role", f"{role!r} is neither prefill nor decode")
        host, port = _split(address)
        if not port:
            raise _Wrong("address", "port 0 cannot be dialled")
        if host not in self._networks:
            message = f"{address} is not within --worker-networks ({self._networks}): name its network there"
            raise _Wrong("address", message)

    async def _resolved(self, address: str) -> str:
        """Return the first address of a name that may be dialled; if there is none, the first one. Raises _Wrong."""
        host, port = _split(address)
        try:
            found = await self._resolver.resolve(host, str(port))
        except OSError as error:
            raise _Wrong("address", f"{host!r}: {error.strerror or error}") from None
        return next((each for each in found if _split(each)[0] in self._networks), found[0])


class _Wrong(Exception):
    """Raised with (field, what is wrong with it)."""


def _split(address: str) -> tuple[str, int]:
    """Return the host and the port of an address. Raises _Wrong."""
    try:
        return split_address(address)
    except AddressError as error:
        raise _Wrong("address", str(error)) from None


def _plain(address: str) -> str:
    """Return IP:PORT in its canonical spelling. Raises _Wrong if the host is no IP address."""
    host, port = _split(address)
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise _Wrong("address", f"{host!r} is not an IP address") from None
    return f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}"
