"""Say why there is no GPU: the driver, its version, or what it shows."""

import pytest

from kvtransfer.memory.cuda_runtime import CudaRuntime, find_runtime, gpu_refusal
from tests.support.kvtransfer.cuda_stand_in import Cudart, Host

CASES = {
    "a driver of CUDA 12 under torch of CUDA 13": (
        Host(driver=12040, built_for=13000),
        "the NVIDIA driver serves CUDA up to 12.4, torch here is built for CUDA 13.0: install driver 580 or newer, or a "
        "torch built for CUDA 12",
    ),
    "a driver of CUDA 11": (Host(driver=11080, built_for=12060), "install driver 525 or newer"),
    "none": (Host(driver=0), "no NVIDIA driver is loaded here"),
    "hidden": (Host(pci_ids=()), "shows this process no GPU: see CUDA_VISIBLE_DEVICES"),
}


@pytest.mark.parametrize("host, words", CASES.values(), ids=CASES)
def test_it_is_said_why_there_is_no_gpu(host, words):
    assert words in CudaRuntime(Cudart(host)).refusal()


def test_a_driver_serves_every_minor_version_of_its_cuda():
    assert CudaRuntime(Cudart(Host(driver=12020, built_for=12080))).refusal() == ""


def test_there_is_a_runtime_or_a_reason():
    assert (find_runtime() is None) == bool(gpu_refusal())
