"""A worker's GPUs read through NVML: a stand-in with the functions of the real module, and the real one without a
GPU."""

import logging
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
import torch

from baton.service.observe.metrics import Metrics
from baton.worker import app
from baton.worker.observe import gpu_health
from baton.worker.observe.gpu_health import THROTTLING, readings_of, watch_gpus

GPUS = [torch.device("cuda", index) for index in range(2)]
USED = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents",
        "nvmlEventSetWait_v2", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetCurrentClocksThrottleReasons", "NVML_TEMPERATURE_GPU", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
        "NVML_VOLATILE_ECC", "nvmlEventTypeXidCriticalError", "NVMLError", *THROTTLING.values())  # fmt: skip


class Nvml(SimpleNamespace):
    """NVML of two GPUs: 61 and 62 degrees, 412.5 W, slowed down by their power limit, 3 and 4 errors; `refused`: calls
    that these GPUs do not support; `xids`: errors that the driver has to report of the first and the second; `unknown`:
    its UUID is no GPU's."""

    def __init__(self, refused=(), xids=((), ()), unknown=None):
        super().__init__(**{name: getattr(pynvml, name) for name in USED})
        self.xids, self.unknown, self.is_open = [list(each) for each in xids], unknown, False
        answers = {
            "nvmlInit": lambda: setattr(self, "is_open", True),
            "nvmlShutdown": lambda: setattr(self, "is_open", False),
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlEventSetCreate": list,
            "nvmlDeviceRegisterEvents": lambda gpu, kinds, events: events.append(gpu),
            "nvmlEventSetWait_v2": self._event,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 61 + gpu,
            "nvmlDeviceGetPowerUsage": lambda gpu: 412_500,
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, since: 3 + gpu,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: pynvml.nvmlClocksThrottleReasonSwPowerCap | 1,
        }
        for name, answer in answers.items():
            assert callable(getattr(pynvml, name))
            setattr(self, name, self._refuse if name in refused else answer)

    def _refuse(self, *given):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _handle(self, uuid):
        if uuid == self.unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return ["GPU-0e1f", "GPU-77aa"].index(uuid)

    def _event(self, events, timeout_ms):
        for gpu in events:
            if self.xids[gpu]:
                return SimpleNamespace(eventData=self.xids[gpu].pop())
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)


@pytest.fixture(autouse=True)
def uuids(monkeypatch):
    """Those that CUDA knows."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=("0e1f", "77aa")[device.index])
    )


@pytest.fixture
def page(monkeypatch):
    """Return a function that shows what a worker on two GPUs with this NVML has on its page."""
    with ExitStack() as exits:

        def show(nvml: Nvml) -> tuple[Metrics, dict[str, float]]:
            monkeypatch.setattr(gpu_health.importlib, "import_module", {"pynvml": nvml}.__getitem__)
            metrics = Metrics("tiny")
            metrics.collect(*readings_of(exits.enter_context(watch_gpus(GPUS))))
            lines = metrics.exposition().body.decode().splitlines()
            return {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith("baton_")}

        yield show


def test_what_the_gpu_of_each_rank_tells(page, caplog):
    """Of two ranks the second one's errors are as much as the first one's."""
    shown = page(nvml := Nvml(xids=([31], [79, 79])))
    expected = {}
    for gpu in range(2):
        labels = f'gpu="{gpu}",model_name="tiny"'
        expected |= {
            f"baton_gpu_temperature_celsius{{{labels}}}": 61 + gpu,
            f"baton_gpu_power_watts{{{labels}}}": 412.5,
            f"baton_gpu_ecc_errors{{{labels}}}": 3 + gpu,
            **{
                f'baton_gpu_throttled{{{labels},reason="{reason}"}}': reason == "power_cap"
                for reason in ("power_cap", "thermal", "thermal_hardware", "power_brake")
            },
        }
    expected['baton_gpu_xids_total{gpu="0",model_name="tiny",xid="31"}'] = 1
    expected['baton_gpu_xids_total{gpu="1",model_name="tiny",xid="79"}'] = 2
    assert {name: value for name, value in shown.items() if "_created" not in name} == expected
    assert nvml.is_open and caplog.text.count("the driver reports Xid 79 of GPU 1, GPU-77aa") == 2


def test_a_gpu_that_does_not_tell_has_no_sample(page):
    refused = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents",
               "nvmlDeviceGetCurrentClocksThrottleReasons")  # fmt: skip
    shown = page(Nvml(refused, xids=([79], [79])))
    assert list(shown) == [f'baton_gpu_temperature_celsius{{gpu="{gpu}",model_name="tiny"}}' for gpu in range(2)]


def test_a_gpu_that_nvml_does_not_know_is_a_line(page, caplog):
    shown = page(Nvml(unknown="GPU-0e1f"))
    assert shown and all('gpu="1"' in name for name in shown), "the other one is read"
    assert "no metrics of the temperature, power and errors of GPU 0: NVML" in caplog.text


def test_nvml_is_closed_at_the_end(monkeypatch):
    monkeypatch.setattr(gpu_health.importlib, "import_module", {"pynvml": (nvml := Nvml())}.__getitem__)
    with watch_gpus(GPUS):
        assert nvml.is_open
    assert not nvml.is_open


def test_without_a_gpu_or_its_driver(monkeypatch, caplog):
    with watch_gpus([torch.device("cpu")]) as gpus:
        assert gpus == {} and not caplog.text

    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    with caplog.at_level(logging.WARNING), watch_gpus(GPUS) as gpus:
        assert gpus == {} and "NVML Shared Library Not Found" in caplog.text


def test_without_the_module(monkeypatch, caplog):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(gpu_health.importlib, "import_module", refuse)
    with watch_gpus(GPUS) as gpus:
        assert gpus == {} and "pip install nvidia-ml-py" in caplog.text


def test_a_worker_watches_the_gpu_of_each_rank(monkeypatch):
    monkeypatch.setattr(app, "devices_for", lambda config: GPUS[: config.num_ranks])

    def watched(device: torch.device, ranks: object, num_ranks: int) -> list[torch.device]:
        config = SimpleNamespace(num_ranks=num_ranks)
        return app._devices_of(
            cast(Any, SimpleNamespace(pool=SimpleNamespace(device=device), ranks=ranks, config=config))
        )

    cpu = torch.device("cpu")
    assert watched(GPUS[0], object(), 2) == GPUS
    assert watched(GPUS[1], None, 1) == [GPUS[1]], "the one that this process computes on"
    assert watched(cpu, object(), 2) == watched(cpu, None, 1) == [cpu]
