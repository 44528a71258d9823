"""Call the part of libcudart that moving KV needs, through ctypes, since kvtransfer does without torch."""

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
_SYSTEM_NOT_READY = 802  # cudaErrorSystemNotReady: GPUs with NVSwitch before their fabric manager runs
_FIRST_DRIVERS = {12: "525", 13: "580"}  # by the major version of CUDA; minor versions need no newer driver
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
_NON_BLOCKING = 1  # streams that do not wait for the default stream
_NO_TIMING = 2  # events that only tell whether they have passed
_LAZY_PEER_ACCESS = 1
_CAPABILITY = (75, 76)  # cudaDevAttrComputeCapabilityMajor, -Minor
_NAMES = ("libcudart.so.13", "libcudart.so.12")
_FOLDERS = ("cu13/lib", "cuda_runtime/lib")  # below site-packages/nvidia, in wheels of CUDA 13 and of CUDA 12


class IpcHandle(ctypes.Structure):
    """The handle of an allocation. A structure, because C takes it by value and ctypes would pass an array as a
    pointer."""

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
    """A call of libcudart failed; the message names the call and the library's reason."""


class CudaRuntime:
    """Call `library`, libcudart or a substitute for it. Every method may raise CudaError. In CUDA each thread has its
    own current device, so each method that needs one sets it."""

    def __init__(self, library):
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = (c_int,), c_char_p

    def num_devices(self) -> int:
        """Return the number of GPUs, 0 without a driver."""
        count = c_int()
        return 0 if self._fails("cudaGetDeviceCount", byref(count)) else count.value

    def refusal(self) -> str:
        """Return why there is no usable GPU, with the versions found and needed; "" if there is one."""
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
        # Without this neither the host nor the streams made here wait for cudaMemset, which could then zero bytes that
        # they have copied there.
        self._call("cudaStreamSynchronize", None)
        return pointer.value or 0

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def handle_of(self, address: int) -> bytes:
        """Return the handle with which another process opens this allocation."""
        handle = IpcHandle()
        self._call("cudaIpcGetMemHandle", byref(handle), address)
        return bytes(handle)

    def open_handle(self, handle: bytes) -> int:
        """Open another process's allocation; return its address in this process."""
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
        """Return the GPU's PCI id, which is the same in all processes, unlike its number."""
        text = ctypes.create_string_buffer(_PCI_ID_BYTES)
        self._call("cudaDeviceGetPCIBusId", text, _PCI_ID_BYTES, device)
        return text.value.decode()

    def reaches(self, device: int, pci_id: str) -> bool:
        """Return whether `device` can read memory of the GPU `pci_id`; False for a GPU that this process does not
        see."""
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
        """Copy within or between devices: `width` bytes at each of `height` places, whose distances are `pitches`
        (target, source)."""
        if height == 1:
            self._call("cudaMemcpyAsync", target, source, width, _DEVICE_TO_DEVICE, stream)
        else:
            places = (target, pitches[0], source, pitches[1], width, height)
            self._call("cudaMemcpy2DAsync", *places, _DEVICE_TO_DEVICE, stream)

    def copy_from_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy, and return when the bytes are there."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, _HOST_TO_DEVICE, stream)
        self.synchronize(stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy, and return when the bytes are there."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, _DEVICE_TO_HOST, stream)
        self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all work on `stream` is done."""
        self._call("cudaStreamSynchronize", stream)

    def _call(self, name: str, *arguments) -> None:
        if code := self._fails(name, *arguments):
            self._fail(name, code)

    def _fails(self, name: str, *arguments) -> int:
        """Return the error code of a call, 0 for success. The error is cleared in this thread: torch asks for the last
        error after each of its kernels, and would attribute it to the kernel."""
        if code := getattr(self._library, name)(*arguments):
            self._library.cudaGetLastError()
        return code

    def _fail(self, name: str, code: int) -> None:
        raise CudaError(f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        text = self._library.cudaGetErrorString(code)
        return f"{text.decode() if text else 'error'} ({code})"


def find_runtime() -> CudaRuntime | None:
    """Return libcudart of torch's own packages or of the system; None without a library, driver or GPU."""
    return _found()[0]


def gpu_refusal() -> str:
    """Return why `find_runtime` returns None, in one line; "" if it does not."""
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
    """Return a version number of CUDA as text: 12080 is "12.8"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _candidates() -> list[str]:
    """Return the paths to try, torch's library first. Two runtimes in one process would share the device's context, but
    one is simpler."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    patterns = [str(Path(root, folder, "libcudart.so.*")) for root in roots for folder in _FOLDERS]
    bundled = [path for pattern in patterns for path in glob.glob(pattern)]
    return [*sorted(bundled, reverse=True), *_NAMES]
