"""The part of libcudart that moving KV needs, through ctypes: kvtransfer does without torch."""

import ctypes
import functools
import glob
import importlib.util
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

from kvtransfer.errors import TransferFailed

HANDLE_BYTES = 64
_PCI_ID_BYTES = 32
_NOT_READY = 600  # cudaErrorNotReady
_NO_DEVICE = 100  # cudaErrorNoDevice
_SYSTEM_NOT_READY = 802  # cudaErrorSystemNotReady: of GPUs with NVSwitch before their fabric manager runs
_FIRST_DRIVERS = {12: "525", 13: "580"}  # by the major version of CUDA, whose minor ones need no newer driver
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
_NON_BLOCKING = 1  # streams that do not wait for the default stream
_NO_TIMING = 2  # events that are only asked whether they have passed
_LAZY_PEER_ACCESS = 1
_CAPABILITY = (75, 76)  # cudaDevAttrComputeCapabilityMajor, -Minor
_NAMES = ("libcudart.so.13", "libcudart.so.12")
_FOLDERS = ("cu13/lib", "cuda_runtime/lib")  # below site-packages/nvidia: of CUDA 13 wheels, of CUDA 12 wheels


class IpcHandle(ctypes.Structure):
    """Passed by value: ctypes would turn an array into a pointer."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


_SIGNATURES = {
    "cudaDriverGetVersion": (POINTER(c_int),),
    "cudaRuntimeGetVersion": (POINTER(c_int),),
    "cudaGetDeviceCount": (POINTER(c_int),),
    "cudaSetDevice": (c_int,),
    "cudaMalloc": (POINTER(c_void_p), c_size_t),
    "cudaFree": (c_void_p,),
    "cudaMemset": (c_void_p, c_int, c_size_t),
    "cudaIpcGetMemHandle": (POINTER(IpcHandle), c_void_p),
    "cudaIpcOpenMemHandle": (POINTER(c_void_p), IpcHandle, c_uint),
    "cudaIpcCloseMemHandle": (c_void_p,),
    "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cudaDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cudaDeviceGetByPCIBusId": (POINTER(c_int), c_char_p),
    "cudaDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cudaStreamCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaStreamDestroy": (c_void_p,),
    "cudaStreamSynchronize": (c_void_p,),
    "cudaEventCreateWithFlags": (POINTER(c_void_p), c_uint),
    "cudaEventDestroy": (c_void_p,),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaGetLastError": (),
    "cudaMemcpy2DAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p),
}


class CudaError(TransferFailed):
    """A call of libcudart that failed; the message names it and what the library says of it."""


class CudaRuntime:
    """`library`: libcudart, or what behaves like it. Raises CudaError from every method. The current device is a
    thread's own in CUDA, so each method that needs one sets it."""

    def __init__(self, library):
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p

    def num_devices(self) -> int:
        """0 where there is no driver."""
        count = c_int()
        return 0 if self._fails("cudaGetDeviceCount", byref(count)) else count.value

    def refusal(self) -> str:
        """Return why there is no GPU to compute on, with the versions found and needed; "" if there is one."""
        count, driver, needed = c_int(), c_int(), c_int()
        code = self._fails("cudaGetDeviceCount", byref(count))
        if not code and count.value:
            return ""
        self._call("cudaDriverGetVersion", byref(driver))
        self._call("cudaRuntimeGetVersion", byref(needed))
        if not driver.value:
            return "no NVIDIA driver is loaded here"
        major = needed.value // 1000
        if driver.value // 1000 < major:
            first = f"driver {_FIRST_DRIVERS[major]} or newer" if major in _FIRST_DRIVERS else "a newer driver"
            return (
                f"the NVIDIA driver serves CUDA up to {_version(driver.value)}, torch here is built for CUDA "
                f"{_version(needed.value)}: install {first}, or a torch built for CUDA {driver.value // 1000}"
            )
        if code in (0, _NO_DEVICE):
            return "the NVIDIA driver shows this process no GPU: see CUDA_VISIBLE_DEVICES and nvidia-smi"
        advice = "; is nvidia-fabricmanager running?" if code == _SYSTEM_NOT_READY else ""
        return f"CUDA does not begin here: {self._words(code)}{advice}"

    def set_device(self, device: int) -> None:
        self._call("cudaSetDevice", device)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of zeroed memory of the current device."""
        pointer = c_void_p()
        self._call("cudaMalloc", byref(pointer), num_bytes)
        self._call("cudaMemset", pointer, 0, num_bytes)
        # Neither the host nor the streams made here wait for it by themselves: it would zero what they have copied
        # there.
        self._call("cudaStreamSynchronize", None)
        return pointer.value or 0

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def handle_of(self, address: int) -> bytes:
        """Return the handle by which another process opens this allocation."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Return the address of another process's allocation in this one."""
        pointer = c_void_p()
        self._call("cudaIpcOpenMemHandle", byref(pointer), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return pointer.value or 0

    def close_handle(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def capability(self, device: int) -> tuple[int, int]:
        """Return the compute capability, (major, minor)."""
        major, minor = c_int(), c_int()
        for out, attribute in zip((major, minor), _CAPABILITY, strict=True):
            self._call("cudaDeviceGetAttribute", byref(out), attribute, device)
        return major.value, minor.value

    def pci_id(self, device: int) -> str:
        """Return what names a GPU whatever number each process gives it."""
        text = ctypes.create_string_buffer(_PCI_ID_BYTES)
        self._call("cudaDeviceGetPCIBusId", text, _PCI_ID_BYTES, device)
        return text.value.decode()

    def reaches(self, device: int, pci_id: str) -> bool:
        """Return whether `device` can read memory of the GPU `pci_id`. False for one that this process does not see."""
        other, can = c_int(), c_int()
        if self._fails("cudaDeviceGetByPCIBusId", byref(other), pci_id.encode()):
            return False
        if other.value == device:
            return True
        self._call("cudaDeviceCanAccessPeer", byref(can), device, other.value)
        return bool(can.value)

    def make_stream(self) -> int:
        stream = c_void_p()
        self._call("cudaStreamCreateWithFlags", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def make_event(self) -> int:
        event = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(event), _NO_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def has_passed(self, event: int) -> bool:
        code = self._fails("cudaEventQuery", event)
        if code not in (0, _NOT_READY):
            self._fail("cudaEventQuery", code)
        return code == 0

    def copy(self, target: int, source: int, width: int, pitches: tuple[int, int], height: int, stream: int) -> None:
        """Within devices: `width` bytes at each of `height` places, which are so many bytes apart in the target and in
        the source."""
        if height == 1:
            self._call("cudaMemcpyAsync", target, source, width, _DEVICE_TO_DEVICE, stream)
        else:
            places = (target, pitches[0], source, pitches[1], width, height)
            self._call("cudaMemcpy2DAsync", *places, _DEVICE_TO_DEVICE, stream)

    def copy_from_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Return when the bytes are there."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, _HOST_TO_DEVICE, stream)
        self.synchronize(stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Return when the bytes are there."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, _DEVICE_TO_HOST, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all that was put on `stream` has passed."""
        self._call("cudaStreamSynchronize", stream)

    def _call(self, name: str, *arguments) -> None:
        if code := self._fails(name, *arguments):
            self._fail(name, code)

    def _fails(self, name: str, *arguments) -> int:
        """Return the code of a call that fails, 0 of others. The thread keeps no error of it: torch asks for the last
        one behind each of its kernels, and would take it for the kernel's."""
        if code := getattr(self._library, name)(*arguments):
            self._library.cudaGetLastError()
        return code

    def _fail(self, name: str, code: int) -> None:
        raise CudaError(f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        text = self._library.cudaGetErrorString(code)
        return f"{text.decode() if text else 'error'} ({code})"


def find_runtime() -> CudaRuntime | None:
    """libcudart of torch's own packages, or the system's; None without one, without a driver, or without a GPU."""
    return _found()[0]


def gpu_refusal() -> str:
    """Return why `find_runtime` finds none, one line; "" where it does."""
    return _found()[1]


@functools.cache
def _found() -> tuple[CudaRuntime | None, str]:
    for name in _candidates():
        try:
            runtime = CudaRuntime(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        why = runtime.refusal()
        return (None if why else runtime), why
    return None, "torch here is built without CUDA, and the system has no libcudart"


def _version(number: int) -> str:
    """12080 -> 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _candidates() -> list[str]:
    """Return paths to try, torch's first: two runtimes in one process share the device's primary context, one is
    simpler."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    patterns = [str(Path(root, folder, "libcudart.so.*")) for root in roots for folder in _FOLDERS]
    bundled = [path for pattern in patterns for path in glob.glob(pattern)]
    return [*sorted(bundled, reverse=True), *_NAMES]
