"""Say why there is no GPU: the driver, its version, or what it shows."""

import pytest

from kvtransfer.memory.cuda_runtime import HANDLE_BYTES, CudaError, CudaRuntime, find_runtime, gpu_refusal
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host

CASES = {
    "a driver of CUDA 12 under torch of CUDA 13": (
        Host(driver=12040, built_for=13000),
        "the NVIDIA driver serves CUDA up to 12.4, torch here is built for CUDA 13.0: install driver 580 or newer, or a "
        "torch built for CUDA 12",
    ),
    "a driver of CUDA 11": (Host(driver=11080, built_for=12060), "install driver 525 or newer"),
    "none": (Host(driver=0), "no NVIDIA driver is loaded here"),
    "GPUs with NVSwitch whose fabric manager does not run": (
        Host(refuses=802),
        "CUDA does not begin here: stand-in error 802 (802); is nvidia-fabricmanager running?",
    ),
    "a driver and a library in a container that do not fit": (
        Host(refuses=803),
        "CUDA does not begin here: stand-in error 803 (803)",
    ),
    "hidden": (Host(pci_ids=()), "shows this process no GPU: see CUDA_VISIBLE_DEVICES"),
}


@pytest.mark.parametrize("host, words", CASES.values(), ids=CASES)
def test_the_runtime_says_why_there_is_no_gpu(host, words):
    assert words in CudaRuntime(Cudart(host)).refusal()


def test_a_driver_serves_every_minor_version_of_its_cuda():
    assert CudaRuntime(Cudart(Host(driver=12020, built_for=12080))).refusal() == ""


def test_there_is_a_runtime_or_a_reason():
    assert (find_runtime() is None) == bool(gpu_refusal())


def test_what_fails_leaves_no_error_in_its_thread():
    """torch asks for the last error behind each kernel that it launches, and would take this one for the kernel's: of a
    source in another container no range could be copied by way of host memory either."""
    library = Cudart(Host())
    runtime = CudaRuntime(library)
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        runtime.open_handle(bytes(HANDLE_BYTES))
    assert library.cudaGetLastError() == 0
    assert not runtime.reaches(0, "0000:09:00.0") and library.cudaGetLastError() == 0
    library = Cudart(Host(driver=0))
    assert CudaRuntime(library).num_devices() == 0 and library.cudaGetLastError() == 0
