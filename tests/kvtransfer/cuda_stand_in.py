"""What behaves like libcudart towards kvtransfer.cuda_runtime, over host memory: it keeps the rules of the real one
(which allocation, which process, which pitch, what has not passed yet) and refuses what that refuses."""

import ctypes
import itertools

INVALID_VALUE, OUT_OF_MEMORY, INVALID_PITCH, INVALID_DEVICE, INVALID_CONTEXT, NOT_READY = 1, 2, 12, 101, 201, 600


class Host:
    """The GPUs of a machine and what all its processes have allocated there."""

    def __init__(self, pci_ids=("0000:01:00.0", "0000:02:00.0"), peers=frozenset({(0, 1), (1, 0)}), num_bytes=1 << 26):
        self.pci_ids, self.peers, self.free_bytes = pci_ids, peers, num_bytes
        self.by_handle: dict[bytes, tuple["Cudart", int]] = {}
        self.serial = itertools.count(1)


class _Function:
    """Takes argtypes and restype as a ctypes function does."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        return self._call(*(each.value if isinstance(each, ctypes.c_void_p) else each for each in arguments))


class Cudart:
    """The library in one process. A copy happens when its event has been asked for `delay` times."""

    def __init__(self, host: Host, delay: int = 2):
        self.host, self.delay, self.device = host, delay, 0
        self.allocations: dict[int, ctypes.Array] = {}
        self.opened: dict[int, list] = {}  # address -> [handle, count]
        self.streams: dict[int, list] = {}  # stream -> copies not done
        self.events: dict[int, list] = {}  # event -> [stream, asked]
        self.num_copies = 0
        self.fail_copy_at = -1
        for name in (name for name in dir(type(self)) if name.startswith("cuda")):
            setattr(self, name, _Function(getattr(self, name)))

    def cudaGetErrorString(self, code):
        return f"stand-in error {code}".encode()

    def cudaGetDeviceCount(self, out):
        out._obj.value = len(self.host.pci_ids)
        return 0

    def cudaSetDevice(self, device):
        if not 0 <= device < len(self.host.pci_ids):
            return INVALID_DEVICE
        self.device = device
        return 0

    def cudaMalloc(self, out, num_bytes):
        if num_bytes > self.host.free_bytes:
            return OUT_OF_MEMORY
        self.host.free_bytes -= num_bytes
        buffer = ctypes.create_string_buffer(b"\xee" * num_bytes, num_bytes)
        out._obj.value = ctypes.addressof(buffer)
        self.allocations[out._obj.value] = buffer
        return 0

    def cudaMemset(self, address, value, num_bytes):
        if not self._reaches(address, num_bytes):
            return INVALID_VALUE
        ctypes.memset(address, value, num_bytes)
        return 0

    def cudaFree(self, address):
        buffer = self.allocations.pop(address, None)
        if buffer is None:
            return INVALID_VALUE
        self.host.free_bytes += len(buffer)
        return 0

    def cudaIpcGetMemHandle(self, out, address):
        if address not in self.allocations:
            return INVALID_VALUE
        handle = address.to_bytes(8, "little") + b"\0\0handle" + bytes(48)
        ctypes.memmove(ctypes.addressof(out._obj), handle, 64)
        self.host.by_handle[handle] = (self, address)
        return 0

    def cudaIpcOpenMemHandle(self, out, handle, flags):
        owner, address = self.host.by_handle.get(bytes(handle), (None, 0))
        if owner is None or address not in owner.allocations:
            return INVALID_VALUE
        if owner is self or address in self.opened:
            return INVALID_CONTEXT  # a process cannot open its own, nor the same one twice
        self.opened[address] = [owner, 1]
        out._obj.value = address
        return 0

    def cudaIpcCloseMemHandle(self, address):
        return 0 if self.opened.pop(address, None) else INVALID_VALUE

    def cudaDeviceGetPCIBusId(self, text, size, device):
        if not 0 <= device < len(self.host.pci_ids):
            return INVALID_DEVICE
        text.value = self.host.pci_ids[device].encode()
        return 0

    def cudaDeviceGetByPCIBusId(self, out, pci_id):
        if pci_id.decode() not in self.host.pci_ids:
            return INVALID_DEVICE
        out._obj.value = self.host.pci_ids.index(pci_id.decode())
        return 0

    def cudaDeviceCanAccessPeer(self, out, device, other):
        out._obj.value = (device, other) in self.host.peers
        return 0

    def cudaStreamCreateWithFlags(self, out, flags):
        out._obj.value = next(self.host.serial)
        self.streams[out._obj.value] = []
        return 0

    def cudaStreamDestroy(self, stream):
        return 0 if self.streams.pop(stream, None) is not None else INVALID_VALUE

    def cudaStreamSynchronize(self, stream):
        for target, source, num_bytes in self.streams[stream]:
            ctypes.memmove(target, source, num_bytes)
        self.streams[stream].clear()
        return 0

    def cudaEventCreateWithFlags(self, out, flags):
        out._obj.value = next(self.host.serial)
        self.events[out._obj.value] = [0, 0]
        return 0

    def cudaEventDestroy(self, event):
        return 0 if self.events.pop(event, None) else INVALID_VALUE

    def cudaEventRecord(self, event, stream):
        self.events[event] = [stream, 0]
        return 0

    def cudaEventQuery(self, event):
        stream, asked = self.events[event]
        self.events[event][1] += 1
        if asked < self.delay:
            return NOT_READY
        return self.cudaStreamSynchronize(stream)

    def cudaMemcpyAsync(self, target, source, num_bytes, kind, stream):
        return self._copy([(target, source, num_bytes)], kind, stream)

    def cudaMemcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        if width > min(target_pitch, source_pitch):
            return INVALID_PITCH
        return self._copy([(target + row * target_pitch, source + row * source_pitch, width) for row in range(height)],
                          kind, stream)  # fmt: skip

    def _copy(self, rows, kind, stream):
        self.num_copies += 1
        if self.num_copies == self.fail_copy_at:
            return INVALID_VALUE
        for target, source, num_bytes in rows:
            if not self._reaches(source, num_bytes) or (kind == 3 and not self._reaches(target, num_bytes)):
                return INVALID_VALUE
        self.streams[stream].extend(rows)
        return 0

    def _reaches(self, address: int, num_bytes: int) -> bool:
        """Whether this process has that memory, its own or opened."""
        for begin, buffer in self.allocations.items():
            if begin <= address and address + num_bytes <= begin + len(buffer):
                return True
        for begin, (owner, _) in self.opened.items():
            buffer = owner.allocations.get(begin, b"")
            if begin <= address and address + num_bytes <= begin + len(buffer):
                return True
        return False
