"""Read a worker's GPU through NVML: temperature, power, throttling and errors."""

import contextlib
import importlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

import torch

from baton.service.observe.metrics import Count, Gauge

INTERVAL_S = 5.0
# Reasons for lower clocks that an operator can do something about, by their names in NVML.
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
    """What was read last. None and empty: the GPU, or its driver, does not tell. `xids`: errors that the driver has
    reported since the worker started, by code."""

    temperature_celsius: float | None = None
    power_watts: float | None = None
    uncorrected_ecc_errors: float | None = None
    throttled: dict[str, float] = field(default_factory=dict)
    xids: Counter[tuple[str, ...]] = field(default_factory=Counter)

    @property
    def readings(self) -> tuple[Gauge | Count, ...]:
        return (
            Gauge("baton_gpu_temperature_celsius", "temperature of the GPU", lambda: self.temperature_celsius),
            Gauge("baton_gpu_power_watts", "power that the GPU draws", lambda: self.power_watts),
            Gauge("baton_gpu_throttled", "1 while this lowers the GPU's clocks", lambda: self.throttled, "reason"),
            Gauge(
                "baton_gpu_ecc_errors", "uncorrected errors of the GPU's memory since its driver was loaded",
                lambda: self.uncorrected_ecc_errors,
            ),
            Count("baton_gpu_xids", "errors that the GPU's driver has reported", lambda: self.xids, "xid"),
        )  # fmt: skip


@contextmanager
def watch_gpu(device: torch.device) -> Iterator[GpuHealth | None]:
    """Read the GPU every INTERVAL_S in a thread until the context ends: a reading may take milliseconds, which the
    event loop has not. None on a CPU, and where NVML cannot be used, which a log line says."""
    if device.type != "cuda":
        yield None
        return
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.warning("no metrics of the GPU's temperature, power and errors: pip install nvidia-ml-py")
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        log.warning("no metrics of the GPU's temperature, power and errors: NVML: %s", exc)
        yield None
        return
    health, stop = GpuHealth(), threading.Event()
    thread = None
    try:
        reader = _Reader(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}", health)
        reader.read()
        thread = threading.Thread(target=reader.run, args=(stop,), name="gpu health", daemon=True)
        thread.start()
    except nvml.NVMLError as exc:  # of a MIG instance NVML knows no such id
        log.warning("no metrics of the GPU's temperature, power and errors: NVML: %s", exc)
    try:
        yield health if thread else None
    finally:
        stop.set()
        if thread:
            thread.join()
        nvml.nvmlShutdown()


class _Reader:
    def __init__(self, nvml: ModuleType, uuid: str, health: GpuHealth):
        """Raises NVMLError for a GPU that NVML does not know."""
        self._nvml, self._health = nvml, health
        self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._events = self._register()

    def _register(self):
        with contextlib.suppress(self._nvml.NVMLError):
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._gpu, self._nvml.nvmlEventTypeXidCriticalError, events)
            return events
        return None

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(INTERVAL_S):
            self.read()

    def read(self) -> None:
        nvml, gpu, health = self._nvml, self._gpu, self._health
        health.temperature_celsius = self._ask(lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        health.power_watts = None if milliwatts is None else milliwatts / 1000
        kind = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        health.uncorrected_ecc_errors = self._ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, *kind))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))
        if reasons is not None:
            health.throttled = {name: float(bool(reasons & getattr(nvml, bit))) for name, bit in THROTTLING.items()}
        while self._events and (event := self._ask(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))):
            health.xids[(str(event.eventData),)] += 1
            log.error("the GPU's driver reports Xid %s", event.eventData)

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return its answer, None where it is not supported, there is no event, or the GPU is gone."""
        try:
            return call()
        except self._nvml.NVMLError:
            return None
