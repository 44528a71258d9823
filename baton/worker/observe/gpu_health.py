"""Read a worker's GPUs through NVML: temperature, power, throttling and errors."""

import contextlib
import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

import torch

from baton.service.observe.metrics import Count, Gauge

INTERVAL_S = 5.0
# NVML's names of the reasons for lower clocks that an operator can act on.
THROTTLING = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "thermal": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "thermal_hardware": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass
class GpuHealth:
    """The last readings of a GPU; None or empty where the GPU or its driver does not tell. `xids`: errors that the
    driver has reported since the worker started, by code."""

    temperature_celsius: float | None = None
    power_watts: float | None = None
    uncorrected_ecc_errors: float | None = None
    throttled: dict[str, float] = field(default_factory=dict)
    xids: Counter[str] = field(default_factory=Counter)


def readings_of(gpus: Mapping[str, GpuHealth]) -> tuple[Gauge | Count, ...]:
    """Return the metrics of GPUs, labelled by their numbers."""

    def throttled() -> dict[tuple[str, str], float]:
        return {(gpu, reason): value for gpu, each in gpus.items() for reason, value in each.throttled.items()}

    def xids() -> dict[tuple[str, ...], float]:
        return {(gpu, xid): number for gpu, each in gpus.items() for xid, number in each.xids.items()}

    return (
        Gauge(
            "baton_gpu_temperature_celsius", "temperature of the GPU",
            lambda: {gpu: each.temperature_celsius for gpu, each in gpus.items()}, "gpu",
        ),
        Gauge(
            "baton_gpu_power_watts", "power that the GPU draws",
            lambda: {gpu: each.power_watts for gpu, each in gpus.items()}, "gpu",
        ),
        Gauge("baton_gpu_throttled", "1 while this lowers the GPU's clocks", throttled, "gpu", "reason"),
        Gauge(
            "baton_gpu_ecc_errors", "uncorrected errors of the GPU's memory since its driver was loaded",
            lambda: {gpu: each.uncorrected_ecc_errors for gpu, each in gpus.items()}, "gpu",
        ),
        Count("baton_gpu_xids", "errors that the GPU's driver has reported", xids, "gpu", "xid"),
    )  # fmt: skip


@contextmanager
def watch_gpus(devices: Sequence[torch.device]) -> Iterator[dict[str, GpuHealth]]:
    """Read these GPUs every INTERVAL_S within the block, in a thread, since a reading may take milliseconds. Yield
    their readings by GPU number, as this process numbers them; none on a CPU, or if NVML cannot be used, which is
    logged."""
    if not any(device.type == "cuda" for device in devices):
        yield {}
        return
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.warning("no metrics of the GPU's temperature, power and errors: pip install nvidia-ml-py")
        yield {}
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        log.warning("no metrics of the GPU's temperature, power and errors: NVML: %s", exc)
        yield {}
        return
    readers = []
    for device in devices:
        try:
            readers.append(_Reader(nvml, device))
        except nvml.NVMLError as exc:  # of a MIG instance NVML knows no such id
            log.warning("no metrics of the temperature, power and errors of GPU %s: NVML: %s", device.index, exc)
    stop = threading.Event()
    thread = threading.Thread(target=_read_often, args=(readers, stop), name="gpu health", daemon=True)
    thread.start()
    try:
        yield {reader.number: reader.health for reader in readers}
    finally:
        stop.set()
        thread.join()
        nvml.nvmlShutdown()


def _read_often(readers: Sequence["_Reader"], stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        for reader in readers:
            reader.read()


class _Reader:
    """Read one GPU."""

    def __init__(self, nvml: ModuleType, device: torch.device):
        """Read the GPU once. Raises NVMLError for a GPU that NVML does not know."""
        self._nvml, self.number, self.health = nvml, str(device.index), GpuHealth()
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        self._events = self._register()
        self.read()

    def _register(self):
        with contextlib.suppress(self._nvml.NVMLError):
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._gpu, self._nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def read(self) -> None:
        nvml, gpu, health = self._nvml, self._gpu, self.health
        health.temperature_celsius = self._ask(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        health.power_watts = None if milliwatts is None else milliwatts / 1000
        kind = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        health.uncorrected_ecc_errors = self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, *kind))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        if reasons is not None:
            health.throttled = {name: float(bool(reasons & getattr(nvml, bit))) for name, bit in THROTTLING.items()}
        while self._events and (event := self._ask(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))):
            health.xids[str(event.eventData)] += 1
            log.error("the driver reports Xid %s of GPU %s, %s", event.eventData, self.number, self._uuid)

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the answer of `call`; None if it is not supported, there is no event, or the GPU is gone."""
        try:
            return call()
        except self._nvml.NVMLError:
            return None
