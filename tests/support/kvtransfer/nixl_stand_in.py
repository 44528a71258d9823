"""Act like NIXL's agents towards kvtransfer.transports.nixl_engine, within one process: only memory that was registered
as what it is (host memory, or a GPU's, of that number) is read, and a transfer ends when it has been asked for
twice."""

import ctypes
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tests.support.kvtransfer.cuda_stand_in import Cudart


class _Piece(NamedTuple):
    base: int
    num_bytes: int
    device: int
    kind: str


class Network:
    """What agents of one machine reach. `gpus`: libraries whose allocations are memory of GPUs."""

    def __init__(self, gpus: list[Cudart]):
        self.gpus = gpus
        self.agents: dict[str, _Agent] = {}
        self.reads_gpus = True  # GPUDirect RDMA works
        self.fails = False  # transfers end with an error
        self.moved: list[tuple[str, str]] = []  # the kinds of memory: to, out of
        self._names = itertools.count()

    @property
    def api(self) -> SimpleNamespace:
        """Return what stands for the module nixl_cu13._api."""
        return SimpleNamespace(nixl_agent=self._agent, nixl_agent_config=SimpleNamespace)

    def is_on_gpu(self, base: int, num_bytes: int) -> bool:
        allocations = [each for gpu in self.gpus for each in gpu.allocations.items()]
        return any(start <= base and base + num_bytes <= start + len(buffer) for start, buffer in allocations)

    def _agent(self, name: str, config: SimpleNamespace) -> "_Agent":
        self.agents[name] = _Agent(name, self)
        return self.agents[name]


class _Agent:
    def __init__(self, name: str, network: Network):
        self._name, self._network = name, network
        self.registered: list[_Piece] = []
        self._known: set[str] = set()

    def create_backend(self, name: str, parameters: dict) -> None:
        assert name == "UCX"

    def register_memory(self, pieces: list[tuple[int, int, int, str]], kind: str) -> list[_Piece]:
        found = [_Piece(base, num_bytes, device, kind) for base, num_bytes, device, _ in pieces]
        for each in found:
            if (kind == "VRAM") != self._network.is_on_gpu(each.base, each.num_bytes):
                raise RuntimeError(f"NIXL_ERR_INVALID_PARAM: not {kind}")
            if kind == "VRAM" and not self._network.reads_gpus:
                raise RuntimeError("NIXL_ERR_BACKEND")
        self.registered += found
        return found

    def deregister_memory(self, pieces: list[_Piece]) -> None:
        for each in pieces:
            self.registered.remove(each)

    def get_agent_metadata(self) -> bytes:
        return self._name.encode()

    def get_new_notifs(self) -> dict:
        return {}

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self._network.agents:
            raise RuntimeError("NIXL_ERR_MISMATCH")
        self._known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self._known.remove(name)

    def get_xfer_descs(self, places: np.ndarray, kind: str) -> list[_Piece]:
        return [_Piece(base, num_bytes, device, kind) for base, num_bytes, device in places.tolist()]

    def initialize_xfer(self, operation: str, ours: list[_Piece], theirs: list[_Piece], peer: str) -> dict:
        assert operation == "READ" and peer in self._known
        for agent, pieces in ((self, ours), (self._network.agents[peer], theirs)):
            for each in pieces:
                if not any(_holds(known, each) for known in agent.registered):
                    raise RuntimeError(f"NIXL_ERR_NOT_FOUND: {each}")
        return {"pieces": list(zip(ours, theirs, strict=True)), "asked": 0}

    def transfer(self, handle: dict) -> str:
        return "PROC"

    def check_xfer_state(self, handle: dict) -> str:
        handle["asked"] += 1
        if handle["asked"] < 2:
            return "PROC"
        if self._network.fails:
            return "ERR"
        for to, out_of in handle["pieces"]:
            ctypes.memmove(to.base, out_of.base, to.num_bytes)
            self._network.moved.append((to.kind, out_of.kind))
        return "DONE"

    def release_xfer_handle(self, handle: dict) -> None:
        handle.clear()


def _holds(known: _Piece, piece: _Piece) -> bool:
    return (
        (known.kind, known.device) == (piece.kind, piece.device)
        and known.base <= piece.base
        and piece.base + piece.num_bytes <= known.base + known.num_bytes
    )
