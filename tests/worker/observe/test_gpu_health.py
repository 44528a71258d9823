"""A worker's GPU read through NVML: a stand-in with the functions of the real module, and the real one without a GPU."""

import logging
from contextlib import ExitStack
from types import SimpleNamespace

import pynvml
import pytest
import torch

from baton.service.observe.metrics import Metrics
from baton.worker.observe import gpu_health
from baton.worker.observe.gpu_health import THROTTLING, watch_gpu

CUDA = torch.device("cuda")
USED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents",
        "nvmlEventSetWait_v2", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetCurrentClocksThrottleReasons", "NVML_TEMPERATURE_GPU", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "NVML_VOLATILE_ECC", "nvmlEventTypeXidCriticalError", "NVMLError", *THROTTLING.values())  # fmt: skip


class Nvml(SimpleNamespace):
    """NVML of one GPU: 61 degrees, 412.5 W, slowed down by its power limit, 3 errors; `refused`: calls that this GPU
    does not support; `xids`: errors that its driver has to report."""

    def __init__(self, refused=(), xids=()):
        super().__init__(**{name: getattr(pynvml, name) for name in USED})
        self.xids, self.is_open = list(xids), False
        answers = {
            "nvmlInit": lambda: setattr(self, "is_open", True),
            "nvmlShutdown": lambda: setattr(self, "is_open", False),
            "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-0e1f": "gpu"}[uuid],
            "nvmlEventSetCreate": lambda: "events",
            "nvmlDeviceRegisterEvents": lambda gpu, kinds, events: None,
            "nvmlEventSetWait_v2": self._event,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 61,
            "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: 3,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: pynvml.nvmlClocksThrottleReasonSwPowerCap | 1,
        }
        for name, answer in answers.items():
            assert callable(getattr(pynvml, name))
            setattr(self, name, self._refuse if name in refused else answer)

    def _refuse(self, *given):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _event(self, events, timeout_ms):
        if not self.xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventData=self.xids.pop())


@pytest.fixture
def page(monkeypatch):
    """Return a function that shows what a worker on a GPU with this NVML has on its page."""
    with ExitStack() as exits:

        def show(nvml: Nvml) -> tuple[Metrics, dict[str, float]]:
            monkeypatch.setattr(gpu_health.importlib, "import_module", {"pynvml": nvml}.__getitem__)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0e1f"))
            health = exits.enter_context(watch_gpu(CUDA))
            if health is None:
                return {}
            metrics = Metrics("tiny")
            metrics.collect(*health.readings)
            lines = metrics.exposition().body.decode().splitlines()
            return {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("baton_")}

        yield show


def test_what_a_gpu_tells(page):
    shown = page(nvml := Nvml(xids=[79, 79, 31]))
    labels = 'model_name="tiny"'
    assert {name: value for name, value in shown.items() if "_created" not in name} == {
        f"baton_gpu_temperature_celsius{{{labels}}}": 61,
        f"baton_gpu_power_watts{{{labels}}}": 412.5,
        f"baton_gpu_ecc_errors{{{labels}}}": 3,
        f'baton_gpu_throttled{{{labels},reason="power_cap"}}': 1,
        f'baton_gpu_throttled{{{labels},reason="thermal"}}': 0,
        f'baton_gpu_throttled{{{labels},reason="thermal_hardware"}}': 0,
        f'baton_gpu_throttled{{{labels},reason="power_brake"}}': 0,
        f'baton_gpu_xids_total{{{labels},xid="79"}}': 2,
        f'baton_gpu_xids_total{{{labels},xid="31"}}': 1,
    }
    assert nvml.is_open


def test_a_gpu_that_does_not_tell_has_no_sample(page):
    refused = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents",
               "nvmlDeviceGetCurrentClocksThrottleReasons")  # fmt: skip
    assert list(page(Nvml(refused, xids=[79]))) == ['baton_gpu_temperature_celsius{model_name="tiny"}']


def test_a_gpu_that_nvml_does_not_know_is_a_line(page, caplog):
    nvml = Nvml(refused=("nvmlDeviceGetHandleByUUID",))
    assert page(nvml) == {} and "no metrics of the GPU's temperature" in caplog.text


def test_nvml_is_closed_at_the_end(monkeypatch):
    monkeypatch.setattr(gpu_health.importlib, "import_module", {"pynvml": (nvml := Nvml())}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0e1f"))
    with watch_gpu(CUDA):
        assert nvml.is_open
    assert not nvml.is_open


def test_without_a_gpu_or_its_driver(monkeypatch, caplog):
    with watch_gpu(torch.device("cpu")) as health:
        assert health is None and not caplog.text

    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with caplog.at_level(logging.WARNING), watch_gpu(CUDA) as health:
        assert health is None and "NVML Shared Library Not Found" in caplog.text


def test_without_the_module(monkeypatch, caplog):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(gpu_health.importlib, "import_module", refuse)
    with watch_gpu(CUDA) as health:
        assert health is None and "pip install nvidia-ml-py" in caplog.text
