"""Find the installed NIXL, and run one of its agents over one pool, in host or GPU memory."""

import asyncio
import importlib
import importlib.util
import re
import resource
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baton.tasks import await_despite_cancel
from kvtransfer.errors import PeerLost, TransferFailed
from kvtransfer.memory.byte_runs import OWN, SOURCE, single_rows

_PACKAGES = ("nixl_cu13", "nixl_cu12")  # the package `nixl` only asks for both
_RDMA_DEVICES = Path("/sys/class/infiniband")
_BUSY_S = 0.002  # for so long a transfer is polled at every turn of the event loop, later every _PAUSE_S
_PAUSE_S = 0.0002
_MAX_IDLE = 16
_MEMORY = re.compile(rb"DRAM|VRAM:(?P<device>[0-9]{1,3})")


def find_package() -> str | None:
    """Return the module that holds NIXL's agent; None if it is not installed."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name)), None)


def has_rdma() -> bool:
    """Return whether UCX finds anything faster than TCP to other machines."""
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def _limit_of_locked() -> str:
    """Return how much memory this process may lock, as part of an error message; "" if there is no limit. A network
    card's queues and the memory it reads are locked."""
    num_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if num_bytes == resource.RLIM_INFINITY:
        return ""
    return f"; this process may lock {num_bytes >> 10} KiB of memory (ulimit -l), RDMA needs it unlimited"


class Segment(NamedTuple):
    """Memory that NIXL reads or writes. `device`: the GPU's number in its own process, 0 for host memory."""

    base: int
    num_bytes: int
    kind: str = "DRAM"  # | VRAM
    device: int = 0

    @property
    def memory(self) -> bytes:
        """Return the memory as a Mapping frame names it: DRAM, or VRAM and the GPU's number."""
        return b"DRAM" if self.kind == "DRAM" else b"VRAM:%d" % self.device

    @classmethod
    def of(cls, base: int, num_bytes: int, memory: bytes) -> "Segment":
        """Return the segment whose memory is named `memory` in a Mapping frame. Raises ValueError for any other
        name."""
        found = _MEMORY.fullmatch(memory)
        if not found:
            raise ValueError(f"no memory of NIXL: {memory[:40]!r}")
        return cls(base, num_bytes, memory[:4].decode(), int(found["device"] or 0))


@dataclass(slots=True)
class NixlPeer:
    """A source's agent, met once. Met again after it was dropped, it is another with the same name."""

    metadata: bytes
    name: str
    num_users: int = 0


class NixlAgent:
    """Run a NIXL agent over the pool `segment`. It has no thread: NIXL's progress thread takes most of a core even when
    idle, so a source polls while it is read, and a taker while it reads."""

    def __init__(self, segment: Segment):
        """Register the pool, which takes most of a second; for a segment on a GPU, on a thread whose current device
        that is. Raises TransferFailed, one line."""
        package = find_package()
        if package is None:
            raise TransferFailed(
                "NIXL is not installed: pip install nixl-cu13 (nixl-cu12 for CUDA 12), or choose other --transports"
            )
        self.segment = segment
        self._peers: dict[bytes, NixlPeer] = {}  # by metadata
        try:
            api = importlib.import_module(f"{package}._api")
            # Names must differ: agents of containers with one hostname would take each other's metadata.
            self._agent = api.nixl_agent(
                secrets.token_hex(16), api.nixl_agent_config(enable_prog_thread=False, backends=[])
            )
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            whole = (segment.base, segment.num_bytes, segment.device, "")
            self._registered = self._agent.register_memory([whole], segment.kind)
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's bindings raise classes of their own
            why = f"NIXL cannot use this pool in {segment.kind}: {type(error).__name__}: {error}"
            raise TransferFailed(why + _limit_of_locked()) from error

    def close(self) -> None:
        """Deregister the pool. No transfer may be under way. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.deregister_memory(self._registered)

    def progress(self) -> None:
        """Serve reads of this source's memory where the network is emulated."""
        self._agent.get_new_notifs()

    def open_peer(self, metadata: bytes) -> NixlPeer:
        """Add a peer, or use a known one, and return it. `close_peer` ends the use. Raises PeerLost for metadata that
        NIXL rejects."""
        peer = self._peers.pop(metadata, None)
        if peer is None:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise PeerLost(f"NIXL does not reach the source: {type(error).__name__}: {error}") from error
            peer = NixlPeer(metadata, name.decode() if isinstance(name, bytes) else name)
        self._peers[metadata] = peer  # the newest last
        peer.num_users += 1
        return peer

    def close_peer(self, peer: NixlPeer) -> None:
        """End one use of a peer. Idle peers are kept up to _MAX_IDLE, since meeting one again takes milliseconds."""
        peer.num_users -= 1
        idle = [each for each in self._peers.values() if not each.num_users]
        for each in idle[: max(0, len(idle) - _MAX_IDLE)]:
            self._drop_peer(each)

    def _drop_peer(self, peer: NixlPeer) -> None:
        """Remove a peer, which ends its connection and all transfers on it."""
        if self._is_known(peer):
            del self._peers[peer.metadata]
            try:
                self._agent.remove_remote_agent(peer.name)
            except Exception:
                pass  # NIXL has removed it itself

    def _is_known(self, peer: NixlPeer) -> bool:
        return self._peers.get(peer.metadata) is peer

    async def read(self, peer: NixlPeer, theirs: Segment, runs: np.ndarray, within_s: float) -> None:
        """Read `runs`, int64 [n, 6] of byte_runs.merged_runs, from a peer's segment. Raises PeerLost. On cancellation
        the transfer is still awaited, so no byte arrives after this has raised; a peer that had to be dropped ends with
        its connection."""
        await await_despite_cancel(asyncio.ensure_future(self._read(peer, theirs, runs, within_s)))

    async def _read(self, peer: NixlPeer, theirs: Segment, runs: np.ndarray, within_s: float) -> None:
        if not self._is_known(peer):
            raise PeerLost("NIXL: another transfer on this connection has failed")
        try:
            to, out_of = self._described(runs, OWN, self.segment), self._described(runs, SOURCE, theirs)
            handle = self._agent.initialize_xfer("READ", to, out_of, peer.name)
            state, began = self._agent.transfer(handle), time.monotonic()
            while state == "PROC" and (elapsed_s := time.monotonic() - began) < within_s:
                await asyncio.sleep(0 if elapsed_s < _BUSY_S else _PAUSE_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                self._drop_peer(peer)
            self._agent.release_xfer_handle(handle)
        except Exception as error:
            self._drop_peer(peer)
            raise PeerLost(f"NIXL: {type(error).__name__}: {error}") from error
        if state != "DONE":
            raise PeerLost("NIXL: the transfer failed" if state == "ERR" else f"NIXL: not done within {within_s:g} s")

    def _described(self, runs: np.ndarray, column: int, segment: Segment):
        rows = single_rows(runs)
        places = np.stack([rows[:, column] + segment.base, rows[:, 2], np.full(len(rows), segment.device)], 1)
        return self._agent.get_xfer_descs(places.astype(np.uint64), segment.kind)
