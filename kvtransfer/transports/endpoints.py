"""Listen for takers and connect to sources: the one module that knows every transport by name."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kvtransfer.errors import PeerLost, TransferFailed
from kvtransfer.layout import Endpoint, KVLayout
from kvtransfer.memory.blocks import BlockMemory
from kvtransfer.memory.cuda_runtime import CudaError
from kvtransfer.memory.device_memory import DeviceRegion
from kvtransfer.memory.region import Region
from kvtransfer.transports import cuda_ipc, grpc_stream, inproc, nixl, shm, tcp
from kvtransfer.transports import socket_folder as folder
from kvtransfer.transports.nixl_engine import NixlAgent, Segment
from kvtransfer.transports.transport import KVConnection

_WILDCARDS = ("0.0.0.0", "::")
_WITH_PORTS = ("grpc", "tcp", "nixl")  # in the order of their ports, unless the system chooses these

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    """Say where a source listens. `advertise_host`: the host that takers on other machines connect to; needed if
    `listen_host` is a wildcard and neither the host's name nor its route to others tells. `socket_folder`: where
    processes of this host meet. `first_port`: the first of `num_ports` ports for takers on other machines; 0: the
    system chooses each."""

    listen_host: str = "127.0.0.1"
    advertise_host: str | None = None
    socket_folder: Path = field(default_factory=folder.default_parent)
    security: grpc_stream.Security = grpc_stream.OPEN
    first_port: int = 0

    def port_of(self, name: str, names: Sequence[str]) -> int:
        """Return the port for the transport `name`, one of the `names` that are listened for; 0: the system chooses."""
        return self.first_port and self.first_port + _with_ports(names).index(name)

    def found(self) -> "Address":
        """Return this address with an `advertise_host` if it listens everywhere. Raises OSError, one line, if none is
        found."""
        if self.advertise_host or self.listen_host not in _WILDCARDS:
            return self
        return replace(self, advertise_host=_own_address(with_ipv6=self.listen_host == "::"))

    def of(self, host: str, port: int) -> str:
        """Return the address at which takers find a listener."""
        host = self.advertise_host or host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_address(with_ipv6: bool) -> str:
    """Return an address of this host: one that its name resolves to, else the one from which it reaches other networks,
    because installers write `127.0.1.1 NAME` to /etc/hosts. Raises OSError."""
    name, found, why = socket.gethostname(), [], "leads to no address"
    try:
        family = socket.AF_UNSPEC if with_ipv6 else socket.AF_INET
        found = [where[0] for *_, where in socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)]
    except OSError as error:
        why += f": {error.strerror}"
    for address in (*sorted(found, key=lambda each: ":" in each), *_ways_out(with_ipv6)):
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    if not found:
        raise OSError(f"this host's name, {name}, {why}; say by --advertise-host where other machines reach it")
    log.warning(
        "this host's name leads to %s alone, at which other machines find no KV: say by --advertise-host where they reach it",
        found[0],
    )
    return found[0]


def _ways_out(with_ipv6: bool) -> Iterator[str]:
    """Yield the addresses from which packets would go to other networks. No packet is sent."""
    elsewhere = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
    for family, target in elsewhere if with_ipv6 else elsewhere[:1]:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            yield sock.getsockname()[0]


def num_ports(names: Sequence[str]) -> int:
    """Return how many ports a source uses for these transports."""
    return len(_with_ports(names))


def _with_ports(names: Sequence[str]) -> list[str]:
    return [name for name in _WITH_PORTS if name in names]


class Memories(NamedTuple):
    """A source's pool: its host memory, the file of that memory if other processes may map it, and the pool on a GPU if
    `host` is its mirror."""

    host: BlockMemory
    region: Region | None
    device: DeviceRegion | None


class Listeners:
    """Hold a source's listeners, one for each transport."""

    def __init__(self):
        self._open: list = []
        self.endpoints: tuple[Endpoint, ...] = ()

    async def open(
        self, names: Sequence[str], pool: Memories, address: Address, host_id: str,
        on_connection: Callable[[KVConnection, str], None],
    ) -> None:  # fmt: skip
        """Open a listener for each transport of `names` by which `pool` can be read. Raises OSError, which names what
        cannot be listened on."""
        if num_ports(names):
            address = address.found()
        for name in names:
            port = address.port_of(name, names) if name in _WITH_PORTS else 0
            found = await self._listen(
                name, pool, address, port, lambda connection, name=name: on_connection(connection, name)
            )
            if found:
                listener, where = found
                self._open.append(listener)
                self.endpoints += (Endpoint(name, where, host_id),)

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()

    async def _listen(self, name: str, pool: Memories, address: Address, port: int, on_connection) -> tuple | None:
        block_bytes = pool.host.layout.block_bytes
        match name:
            case "inproc":
                listener = inproc.InprocListener(pool.host, on_connection)
                return listener, listener.name
            case "cuda_ipc" if pool.device is not None:
                try:
                    listener = cuda_ipc.CudaIpcListener(pool.device, block_bytes, address.socket_folder, on_connection)
                except CudaError as error:
                    log.warning("cuda_ipc is not offered, this GPU's memory cannot be shared: %s", error)
                    return None
                return listener, listener.address
            case "shm" if pool.region is not None:
                listener = shm.ShmListener(pool.region, pool.host.layout, address.socket_folder, on_connection)
                return listener, listener.address
            case "tcp":
                listener = await tcp.listen(address.listen_host, on_connection, port)
                return listener, address.of(*listener.sock.getsockname()[:2])
            case "nixl":
                try:
                    agent = await _agent(pool.host, pool.device)
                except TransferFailed as error:
                    if pool.device is None:
                        raise OSError(str(error)) from error
                    log.warning("nixl is not offered, the network cannot read this GPU's memory: %s", error)
                    return None
                listener = await nixl.listen(address.listen_host, agent, block_bytes, on_connection, port)
                return listener, address.of(*listener.sock.getsockname()[:2])
            case "grpc":
                listener = await grpc_stream.listen(address.listen_host, on_connection, address.security, port)
                return listener, address.of(address.listen_host, listener.port)
        return None


class Dialer:
    """Connect to sources, and keep what is reused from one fetch to the next."""

    def __init__(
        self, memory: BlockMemory, device: DeviceRegion | None, socket_folder: Path | None = None,
        security: grpc_stream.Security = grpc_stream.OPEN,
    ):  # fmt: skip
        """Connect nothing yet; `memory`: the pool that is written into; `device`: the same pool on a GPU, if it is
        there."""
        self._security = security
        self._memory = memory
        self._device = device
        self._copier: cuda_ipc.Copier | None = None
        self._agent: NixlAgent | None = None
        self._no_agent = ""  # why no agent could be made
        self._making_agent = asyncio.Lock()
        self._socket_folder = socket_folder or folder.default_parent()
        self._mappings = shm.Mappings()

    async def open(self, endpoint: Endpoint, layout: KVLayout) -> KVConnection:
        """Connect to `endpoint`; `layout`: that of the source's pool. Raises PeerLost."""
        match endpoint.transport:
            case "inproc":
                return await inproc.connect(endpoint.address)
            case "cuda_ipc":
                where = (endpoint.address, self._socket_folder, self._own_copier())
                return await cuda_ipc.connect(*where, layout.block_bytes)
            case "shm":
                return await shm.connect(endpoint.address, self._socket_folder, self._mappings, layout)
            case "nixl":
                return await nixl.connect(endpoint.address, await self._own_agent(), layout.block_bytes)
            case "grpc":
                return await grpc_stream.connect(endpoint.address, self._security)
            case _:
                return await tcp.connect(endpoint.address)

    def _own_copier(self) -> cuda_ipc.Copier:
        """Return the copier, made when it is first needed. Raises PeerLost, so that another transport is tried."""
        try:
            self._copier = self._copier or cuda_ipc.Copier(self._device)
        except CudaError as error:
            raise PeerLost(str(error)) from error
        return self._copier

    async def _own_agent(self) -> NixlAgent:
        """Return the agent, made when it is first needed. A failure is remembered, so that later fetches do not wait
        for another try. Raises PeerLost, so that another transport is tried."""
        async with self._making_agent:
            if self._agent is None and not self._no_agent:
                try:
                    self._agent = await _agent(self._memory, self._device)
                except TransferFailed as error:
                    self._no_agent = str(error)
            if self._agent is None:
                raise PeerLost(self._no_agent)
            return self._agent

    def close(self) -> None:
        """Unmap the pools of other processes. No fetch may be under way."""
        self._mappings.clear()
        if self._copier:
            self._copier.close()
            self._copier = None
        if self._agent:
            self._agent.close()
            self._agent = None


async def _agent(host: BlockMemory, device: DeviceRegion | None) -> NixlAgent:
    """Make an agent over a pool, on the GPU or in host memory. Raises TransferFailed."""
    return await asyncio.get_running_loop().run_in_executor(None, _make_agent, host, device)  # most of a second


def _make_agent(host: BlockMemory, device: DeviceRegion | None) -> NixlAgent:
    if device is None:
        return NixlAgent(Segment(host.blocks.ctypes.data, host.blocks.nbytes))
    device.runtime.set_device(device.device)
    return NixlAgent(Segment(device.address, device.num_bytes, "VRAM", device.device))
