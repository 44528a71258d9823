"""Act like libcudart towards kvtransfer.memory.cuda_runtime, over files in a folder, so that several processes share
the machine's GPUs: keep the rules of the real one (which allocation, which process, which pitch, what has not passed
yet) and refuse what it refuses."""

import ctypes
import itertools
import mmap
import secrets
import tempfile
import threading
import time
from pathlib import Path

INSUFFICIENT_DRIVER, NO_DEVICE = 35, 100
INVALID_VALUE, OUT_OF_MEMORY, INVALID_PITCH, INVALID_DEVICE, INVALID_CONTEXT, NOT_READY = 1, 2, 12, 101, 201, 600


class Host:
    """The GPUs of a machine. `folder`: what all its processes have allocated there, a file each."""

    def __init__(
        self,
        folder=None,
        pci_ids=("0000:01:00.0", "0000:02:00.0"),
        peers=frozenset({(0, 1), (1, 0)}),
        num_bytes=1 << 26,
        driver=13000,
        built_for=13000,
        capabilities=(),
        refuses=0,
    ):
        """`driver`: the newest CUDA that the driver serves, 0 without one; `built_for`: the library's; `capabilities`:
        of each GPU (default: 9.0); `refuses`: the error with which CUDA does not begin."""
        self.pci_ids, self.peers, self.free_bytes = pci_ids, peers, num_bytes
        self.driver, self.built_for, self.refuses = driver, built_for, refuses
        self.capabilities = capabilities or ((9, 0),) * len(pci_ids)
        self._own_folder = None if folder else tempfile.TemporaryDirectory()
        self.folder = Path(folder or self._own_folder.name)
        self.serial = itertools.count(1)
        self.breaks_copies = False  # what one process reads of another's memory arrives with wrong bytes
        self.open_s = 0.0  # to open another process's allocation


class _Errors(threading.local):
    """What the last call of a thread that failed has left there."""

    last = 0


class _Function:
    """Takes argtypes and restype as a ctypes function does."""

    def __init__(self, call, errors: _Errors | None = None):
        self._call, self._errors = call, errors

    def __call__(self, *arguments):
        code = self._call(*(each.value if isinstance(each, ctypes.c_void_p) else each for each in arguments))
        if self._errors is not None and code not in (0, NOT_READY):
            self._errors.last = code
        return code


class Cudart:
    """The library in one process. A copy happens when its event has been asked for `delay` times."""

    def __init__(self, host: Host, delay: int = 2):
        self.host, self.delay, self.device = host, delay, 0
        self.name = secrets.token_hex(8)
        self.allocations: dict[int, ctypes.Array] = {}
        self.files: dict[int, Path] = {}  # address -> what another process opens
        self.opened: dict[int, tuple[ctypes.Array, bytes]] = {}  # address -> its bytes, its handle
        self.streams: dict[int, list] = {}  # stream -> copies not done
        self.settings: list[tuple[int, int, int]] = []  # of memory, by the default stream, not done
        self._settling = threading.Lock()
        self.events: dict[int, list] = {}  # event -> [stream, asked]
        self.num_copies = 0
        self.num_opened, self.opened_in = 0, set()  # the threads that opened
        self.fail_copy_at = -1
        self.cannot_open = False  # as in another container
        self._errors = _Errors()
        for name in (name for name in dir(type(self)) if name.startswith("cuda")):
            errors = None if name.startswith("cudaGet") and "Error" in name else self._errors
            setattr(self, name, _Function(getattr(self, name), errors))

    def cudaGetLastError(self):
        code, self._errors.last = self._errors.last, 0
        return code

    def cudaGetErrorString(self, code):
        return f"stand-in error {code}".encode()

    def cudaDriverGetVersion(self, out):
        out._obj.value = self.host.driver
        return 0

    def cudaRuntimeGetVersion(self, out):
        out._obj.value = self.host.built_for
        return 0

    def cudaGetDeviceCount(self, out):
        if self.host.driver // 1000 < self.host.built_for // 1000:
            return INSUFFICIENT_DRIVER
        if self.host.refuses:
            return self.host.refuses
        if not self.host.pci_ids:
            return NO_DEVICE
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
        path = self.host.folder / f"{self.name}-{next(self.host.serial)}"
        path.write_bytes(b"\xee" * num_bytes)
        buffer = _mapped(path)
        out._obj.value = ctypes.addressof(buffer)
        self.allocations[out._obj.value], self.files[out._obj.value] = buffer, path
        return 0

    def cudaMemset(self, address, value, num_bytes):
        if not self._reaches(address, num_bytes):
            return INVALID_VALUE
        self.settings.append((address, value, num_bytes))
        return 0

    def cudaFree(self, address):
        self._settle()  # it waits for the device
        buffer = self.allocations.pop(address, None)
        if buffer is None:
            return INVALID_VALUE
        self.host.free_bytes += len(buffer)
        self.files.pop(address).unlink()
        return 0

    def cudaIpcGetMemHandle(self, out, address):
        if address not in self.allocations:
            return INVALID_VALUE
        ctypes.memmove(ctypes.addressof(out._obj), self.files[address].name.encode().ljust(64, b"\0"), 64)
        return 0

    def cudaIpcOpenMemHandle(self, out, handle, flags):
        name = bytes(handle).rstrip(b"\0").decode(errors="replace")
        path = self.host.folder / name
        if self.cannot_open or not name or "/" in name or "\0" in name or not path.is_file():
            return INVALID_VALUE
        if name.startswith(self.name) or any(bytes(handle) == each for _, each in self.opened.values()):
            return INVALID_CONTEXT  # a process cannot open its own, nor the same one twice
        time.sleep(self.host.open_s)
        self.num_opened += 1
        self.opened_in.add(threading.get_ident())
        buffer = _mapped(path)
        out._obj.value = ctypes.addressof(buffer)
        self.opened[out._obj.value] = (buffer, bytes(handle))
        return 0

    def cudaIpcCloseMemHandle(self, address):
        return 0 if self.opened.pop(address, None) else INVALID_VALUE

    def cudaDeviceGetAttribute(self, out, attribute, device):
        if attribute not in (75, 76) or not 0 <= device < len(self.host.pci_ids):
            return INVALID_VALUE
        out._obj.value = self.host.capabilities[device][attribute - 75]
        return 0

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
        """Other streams do not wait for the default one: what is set there comes behind their copies."""
        for target, source, num_bytes in self.streams.get(stream, ()):
            ctypes.memmove(target, source, num_bytes)
            if self.host.breaks_copies and self._is_opened(source):
                ctypes.c_ubyte.from_address(target).value ^= 0xFF
        if stream:
            self.streams[stream].clear()
        self._settle()
        return 0

    def _settle(self):
        with self._settling:  # none is freed while another thread sets it
            while self.settings:
                ctypes.memset(*self.settings.pop())

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
        self.num_copies += kind == 3
        if self.num_copies == self.fail_copy_at:
            return INVALID_VALUE
        for target, source, num_bytes in rows:
            if kind != 1 and not self._reaches(source, num_bytes):
                return INVALID_VALUE
            if kind != 2 and not self._reaches(target, num_bytes):
                return INVALID_VALUE
        self.streams[stream].extend(rows)
        return 0

    def _is_opened(self, address: int) -> bool:
        return any(begin <= address < begin + len(buffer) for begin, (buffer, _) in self.opened.items())

    def _reaches(self, address: int, num_bytes: int) -> bool:
        """Return whether this process has that memory, its own or opened."""
        known = [*self.allocations.items(), *((begin, buffer) for begin, (buffer, _) in self.opened.items())]
        return any(begin <= address and address + num_bytes <= begin + len(buffer) for begin, buffer in known)


def _mapped(path: Path) -> ctypes.Array:
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    return (ctypes.c_char * len(mapping)).from_buffer(mapping)
