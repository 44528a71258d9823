"""Step 2: copy between GPUs as KV transfers do, one process reading the memory of another: whether the bytes arrive,
how fast, and how long opening and closing take."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from baton.cli.gpu.check import Say
from kvtransfer.memory.cuda_runtime import CudaError, CudaRuntime, find_runtime
from kvtransfer.memory.device_memory import CANARY_BYTES, DeviceRegion, wrong_canary_bytes

NUM_BYTES = 1 << 30
NUM_RUNS = 4
_HOLDER = """
import sys
from kvtransfer.memory.cuda_runtime import find_runtime
from kvtransfer.memory.device_memory import DeviceRegion
region = DeviceRegion(find_runtime(), int(sys.argv[1]), int(sys.argv[2]))
print(region.handle.hex(), flush=True)
sys.stdin.read()
"""

# GPU, bytes -> the IPC handle of a region in another process
Hold = Callable[[int, int], AbstractContextManager[bytes]]


@contextmanager
def held_elsewhere(device: int, num_bytes: int) -> Iterator[bytes]:
    """Let another process hold a region until the context ends. Raises CudaError if it cannot."""
    argv = [sys.executable, "-c", _HOLDER, str(device), str(num_bytes)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        line = holder.stdout.readline().strip()
        if not line:
            raise CudaError(f"GPU {device}: a process could not allocate {num_bytes >> 20} MiB there")
        yield bytes.fromhex(line)  # leaving closes its stdin, which ends it


def check(
    say: Say,
    model: Path | None,
    runtime: CudaRuntime | None = None,
    hold: Hold = held_elsewhere,
    num_bytes: int = NUM_BYTES,
) -> None:
    runtime = runtime or find_runtime()
    assert runtime is not None
    devices = range(runtime.num_devices())
    for source in devices:
        takers = [taker for taker in devices if runtime.reaches(taker, runtime.pci_id(source))]
        for taker in devices:
            if taker not in takers:
                say(_name(source, taker), None, "CUDA offers no copies between the two: KV goes through host memory")
        with ExitStack() as held:
            try:
                handle = held.enter_context(hold(source, num_bytes))
            except CudaError as error:
                for taker in takers:
                    say(_name(source, taker), False, str(error))
                continue
            for taker in takers:
                _pair(say, runtime, handle, num_bytes, _name(source, taker), taker)


def _name(source: int, taker: int) -> str:
    return f"GPU {source} to GPU {taker}"


def _pair(say: Say, runtime: CudaRuntime, handle: bytes, num_bytes: int, name: str, taker: int) -> None:
    try:
        runtime.set_device(taker)
        begun = time.monotonic()
        address = runtime.open_handle(handle)
        open_s = time.monotonic() - begun
        try:
            wrong = wrong_canary_bytes(runtime, taker, address + num_bytes)
            seconds = _copy_s(runtime, taker, address, num_bytes)
        finally:
            begun = time.monotonic()
            runtime.close_handle(address)
            close_s = time.monotonic() - begun
    except CudaError as error:
        say(name, False, f"{error}; in containers: one PID and one IPC namespace, and all GPUs visible in both")
        return
    if wrong:
        say(name, False, f"{wrong} of {CANARY_BYTES} bytes arrived wrong, although CUDA offers copies: IOMMU or ACS")
        return
    rate = num_bytes / seconds / 1e9
    say(name, True, f"{rate:.0f} GB/s; opened in {open_s * 1e3:.1f} ms, closed in {close_s * 1e3:.1f} ms")


def _copy_s(runtime: CudaRuntime, device: int, address: int, num_bytes: int) -> float:
    """Return the shortest time of copying the whole region to this GPU."""
    own, stream = DeviceRegion(runtime, device, num_bytes), runtime.make_stream()
    try:
        best = float("inf")
        for _ in range(NUM_RUNS):
            begun = time.monotonic()
            runtime.copy(own.address, address, num_bytes, (num_bytes, num_bytes), 1, stream)
            runtime.synchronize(stream)
            best = min(best, time.monotonic() - begun)
        return best
    finally:
        runtime.destroy_stream(stream)
        own.close()
