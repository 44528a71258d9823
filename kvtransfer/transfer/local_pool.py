"""Describe a worker's pool to both ends of its transfers: where its bytes are, and which part of the model they
hold."""

from dataclasses import dataclass

from kvtransfer.capabilities import CAPABILITIES, DEVICE, HOST
from kvtransfer.layout import KVLayout
from kvtransfer.memory.blocks import BlockMemory, MemoryKernels
from kvtransfer.memory.pools import DevicePool, Mirror, OnDevice
from kvtransfer.memory.region import Region
from kvtransfer.memory.reshard import Sharding
from kvtransfer.transfer.mirror_room import MirrorRoom


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Hold the memories of one pool. `host`: the pool in host memory, or the host mirror of a pool on a GPU, in which
    case `device` is that pool. `region`: the file that backs `host`, if other processes may map it; shm needs it.
    `room`: bounds the mirror, if it is bounded."""

    sharding: Sharding
    host: BlockMemory
    device: OnDevice | None = None
    region: Region | None = None
    room: MirrorRoom | None = None

    @classmethod
    def of(
        cls, memory, held: KVLayout | Sharding, *, region: Region | None = None, device: DevicePool | None = None,
        kernels: MemoryKernels | None = None, room: MirrorRoom | None = None,
    ) -> "LocalPool":  # fmt: skip
        """Return the pool over `memory`, the bytes of `host`. `held`: the layout of the whole model if this pool holds
        it whole, else the sharding and the rank. `kernels`: for host memory; numpy is used without them. Raises
        LayoutMismatch for a layout that cannot be moved."""
        sharding = Sharding.whole(held) if isinstance(held, KVLayout) else held
        layout = sharding.pool_layout
        if device is None:
            return cls(sharding, BlockMemory(memory, layout, kernels), None, region, room)
        host, on_device = Mirror(memory, layout, device, kernels), OnDevice(memory, layout, device)
        return cls(sharding, host, on_device, region, room)

    @property
    def layout(self) -> KVLayout:
        """Return the layout of the whole model."""
        return self.sharding.layout

    @property
    def memory(self) -> tuple[str, ...]:
        """Return the kinds of memory that transports must be able to move between."""
        return (HOST,) if self.device is None else (HOST, DEVICE)

    def used_by(self, transport: str) -> BlockMemory:
        """Return the memory that a transport reads and writes."""
        return self.device if self.device and DEVICE in CAPABILITIES[transport].memory else self.host
