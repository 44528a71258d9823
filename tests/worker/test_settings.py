"""Count the hand-written files that name a setting of a worker: where it is declared, and where it is used."""

import argparse
import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import decode_worker.role
import prefill_worker.role
from baton.engine.core import config
from baton.engine.core import device as engine_device
from baton.engine.core.config import EngineConfig
from baton.service.settings import SettingsError, add_flags, flat_fields, load_settings, to_argv
from baton.worker import app, settings
from baton.worker.main import main
from baton.worker.settings import WorkerSettings
from gateway.attempts import kv_fetch
from gateway.config.settings import GatewaySettings
from kvtransfer.transfer import dialogue
from tests.support.process import ROOT

SOURCES = [path for room in ("baton", "prefill_worker", "decode_worker") for path in (ROOT / room).rglob("*.py")]
MAX_FILES = 2
WITHOUT_TORCH = """
import sys
import prefill_worker.role as r
from baton.worker.main import main
sys.modules["torch"] = None  # which fails to be imported
sys.exit(main(r.ROLE, ["--model", "m", "--listen", "127.0.0.1:0"]))
"""


def own_settings() -> list[str]:
    """Return the settings that WorkerSettings declares itself: not its engine's, nor those that gateways have too."""
    shared = {field.name for base in WorkerSettings.__bases__ for field in dataclasses.fields(base)}
    return [field.name for field in dataclasses.fields(WorkerSettings) if field.name not in {*shared, "engine"}]


def files_that_read(name: str) -> list[str]:
    """Return the files that read `settings.NAME`, and `self.NAME` of the settings themselves."""
    return [str(path.relative_to(ROOT)) for path in SOURCES if _reads(path, name)]


def _reads(path: Path, name: str) -> bool:
    is_home = path == Path(settings.__file__)
    owners = ("settings", "self") if is_home else ("settings",)
    return is_home or any(owner.endswith(owners) for owner, attribute in _attributes(path) if attribute == name)


@cache
def _attributes(path: Path) -> list[tuple[str, str]]:
    """Return (owner, name) of each attribute that is named in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [(ast.unparse(node.value), node.attr) for node in nodes if isinstance(node, ast.Attribute)]


@pytest.mark.parametrize("name", own_settings())
def test_a_setting_is_declared_in_one_file_and_used_in_another(name):
    # `baton up` and gateways have settings of their own that are called listen, admin and log_level.
    readers = [path for path in files_that_read(name) if not path.startswith(("baton/cli", "baton/service"))]
    assert len(readers) <= MAX_FILES, f"{name} is named in {readers}"


def scratch_copy(module, tmp_path: Path, before: str, line: str):
    """The module with one more line in front of `before`, imported under a name of its own."""
    text = Path(module.__file__).read_text()
    assert text.count(before) == 1
    path = tmp_path / f"scratch_{Path(module.__file__).name}"
    path.write_text(text.replace(before, f"{line}\n{before}"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = copy  # dataclasses look their module up
    spec.loader.exec_module(copy)
    return copy


def flags_of(cls: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_flags(parser, cls)
    return parser


def test_a_made_up_setting_is_one_line(tmp_path):
    """A flag, a variable, a line of the help and of what `baton up` passes on."""
    line = '    made_up_s: float = option("seconds without a use", 2.5)'
    cls = scratch_copy(settings, tmp_path, "    log_level: str", line).WorkerSettings
    parser = flags_of(cls)
    assert "--made-up-s" in parser.format_help() and "without a use (default: 2.5)" in parser.format_help()
    flags = {"model": str(tmp_path)}
    assert load_settings(cls, flags, {"BATON_MADE_UP_S": "4"}).made_up_s == 4.0
    assert to_argv(cls, {"made_up_s": 4.0}) == ["--made-up-s=4.0"]


def test_a_made_up_setting_of_the_engine_is_one_line(tmp_path):
    line = '    num_made_up: int | None = option("things without a use", None)'
    engine = scratch_copy(config, tmp_path, "    sm_share: float", line).EngineConfig

    @dataclasses.dataclass(frozen=True)
    class Settings:
        engine: EngineConfig

    Settings.__annotations__["engine"] = engine
    assert "--num-made-up" in flags_of(Settings).format_help()
    assert load_settings(Settings, {"model": "m", "num_made_up": "3"}, {}).engine.num_made_up == 3


def test_no_setting_of_the_engine_is_declared_again():
    own = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not own & set(own_settings()) and own <= flat_fields(WorkerSettings).keys()


def test_a_lease_outlives_the_pauses_between_its_renewals():
    """One that did not ended amid each transfer that waited for a chunk of its prompt for longer."""
    assert max(dialogue.RENEW_S, kv_fetch._RENEW_S) < settings.LEAST_LEASE_S
    with pytest.raises(SettingsError, match=r"--lease-ttl-s 1.5: must be at least 2 and below 3600"):
        load_settings(WorkerSettings, {"model": "m", "lease_ttl_s": "1.5"}, {})
    assert load_settings(WorkerSettings, {"model": "m", "lease_ttl_s": "2"}, {}).lease_ttl_s == settings.LEAST_LEASE_S


@pytest.mark.parametrize(
    ("role", "device", "flags", "expected"),
    [
        (prefill_worker.role.ROLE, "cpu", [], (64, 512)),
        (prefill_worker.role.ROLE, "cuda", [], (64, 8192)),
        (decode_worker.role.ROLE, "cuda", [], (256, 2048)),
        (decode_worker.role.ROLE, "cuda", ["--max-num-seqs", "32"], (32, 2048)),
        (prefill_worker.role.ROLE, "cuda", ["--max-num-batched-tokens", "1024"], (64, 1024)),
    ],
)
def test_a_gpu_has_defaults_of_its_own_and_flags_win(monkeypatch, role, device, flags, expected):
    served = []

    async def serve(settings, name, table, stop):
        served.append(settings.engine)
        return 0

    monkeypatch.setattr(engine_device, "find_device", lambda asked: torch.device(device))
    monkeypatch.setattr(app, "serve", serve)
    assert main(role, ["--model", "folder", *flags]) == 0
    (config,) = served
    assert (config.max_num_seqs, config.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    "given, words",
    [
        ({"kv_port": "65535"}, "--kv-port 65535: must be from 1 to 65533, for 3 ports from there on, or 0: the system"),
        ({"kv_port": "65535", "transports": "tcp,grpc"}, "--kv-port 65535: must be from 1 to 65534, for 2 ports"),
        ({"kv_port": "-1"}, "--kv-port -1: must be from 1 to 65533, for 3 ports"),
        ({"kv_port": "5000", "transports": "shm"}, "--kv-port has no effect with --transports shm; leave it out"),
        ({"gateways": "nonsense"}, "--gateways: 'nonsense' is not HOST:PORT"),
        ({"gateways": "a:1,b:0"}, "--gateways: b:0: nobody listens at port 0"),
        ({"adapter_root": "/no/such"}, "--adapter-root /no/such: no such folder"),
        ({"workers_per_gpu": "7", "device": "cpu"}, "--workers-per-gpu has no effect on a CPU; leave it out"),
    ],
)
def test_what_can_have_no_effect_is_refused(given, words):
    with pytest.raises(SettingsError, match=f"^{re.escape(words)}"):
        load_settings(WorkerSettings, {"model": "m", **given}, {})


@pytest.mark.parametrize("cls", [WorkerSettings, GatewaySettings])
def test_no_reflection_is_none(cls):
    """It was on all the same, on loopback."""
    flags = flags_of(cls)
    told = [load_settings(cls, flags.parse_args(["--model=m", *argv]), {}) for argv in ((), ("--no-reflection",))]
    assert [each.has_reflection(True) for each in told] == [True, False]
    assert not any(each.has_reflection(False) for each in told)


@pytest.mark.parametrize("given", [{"transports": "tcp"}, {"transports": "shm,grpc"}, {"transports": "nixl"}])
def test_one_port_may_be_the_last(given):
    assert load_settings(WorkerSettings, {"model": "m", "kv_port": "65535", **given}, {}).kv_port == 65535


def test_each_gpu_of_a_worker_has_ports_of_its_own(monkeypatch):
    monkeypatch.setattr(settings, "find_runtime", lambda: "a GPU")
    given = {"model": "m", "kv_port": "65530", "transports": "grpc", "tensor_parallel": "8"}
    with pytest.raises(SettingsError, match="--kv-port 65530: must be from 1 to 65528, for 8 ports from there on"):
        load_settings(WorkerSettings, given, {})
    assert load_settings(WorkerSettings, {**given, "device": "cpu"}, {}).kv_port == 65530


def test_a_wrong_tier_is_told_before_torch_is_imported():
    argv = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"BATON_ISA": "sse9"}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("prefill_worker: BATON_ISA=sse9: ")
