"""compose.yaml: valid by the schema, and every command, flag, address and file in it exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OURS = sorted(set(SERVICES) - {"redis"})


def test_valid_by_the_schema():
    program = Path(sys.executable).with_name("check-jsonschema")
    argv = [program, "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def modules() -> list[tuple[str, str]]:
    """(module, flag or "") of every `python -m` in it."""
    found = set()
    for service in SERVICES.values():
        for argv in (service["command"], service["healthcheck"]["test"][1:]):
            if argv[:2] == ["python", "-m"]:
                found.add((argv[2], ""))
                found.update((argv[2], word.partition("=")[0]) for word in argv[3:] if word.startswith("--"))
    return sorted(found)


@pytest.fixture(scope="module")
def help_of():
    texts: dict[str, str] = {}

    def text(module: str) -> str:
        if module not in texts:
            argv = [sys.executable, "-m", module, "--help"]
            texts[module] = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return texts[module]

    return text


@pytest.mark.parametrize("module, flag", modules())
def test_every_command_and_flag_exists(help_of, module, flag):
    assert not flag or re.search(rf"{re.escape(flag)}\b(?!-)", help_of(module)), f"{module} knows no {flag}"


def flag(service: str, name: str) -> str:
    words = SERVICES[service]["command"]
    if f"--{name}" in words:
        return words[words.index(f"--{name}") + 1]
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_gateway_dials_the_workers_where_they_listen(role):
    for service in (role, f"{role}-cpu"):
        listen = flag(service, "listen")
        assert flag("gateway", f"{role}-workers") == listen
        assert listen.partition(":")[0] in SERVICES[service]["networks"]["default"]["aliases"]


def test_health_checks_ask_where_the_process_listens():
    for service in OURS:
        port = flag(service, "listen").rpartition(":")[2]
        assert SERVICES[service]["healthcheck"]["test"][-1].endswith(f":{port}")


def test_published_port_is_the_gateways():
    port = flag("gateway", "listen").rpartition(":")[2]
    assert [entry.rpartition(":")[2] for entry in SERVICES["gateway"]["ports"]] == [port]
    assert not any("ports" in service for name, service in SERVICES.items() if name != "gateway")


def test_gpus_and_profiles():
    for role, default in (("prefill", "0"), ("decode", "1")):
        (device,) = SERVICES[role]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [f"${{{role.upper()}_GPU:-{default}}}"]
        assert SERVICES[role]["profiles"] == ["gpu"] and SERVICES[f"{role}-cpu"]["profiles"] == ["cpu"]
        assert "deploy" not in SERVICES[f"{role}-cpu"]
    assert "COMPOSE_PROFILES=gpu" in (ROOT / ".env").read_text().splitlines()


def test_build_targets_and_files_exist():
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    for service in OURS:
        build = SERVICES[service]["build"]
        assert build["target"] in targets and (ROOT / build["dockerfile"]).is_file()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists() and f"!{name}" in (ROOT / ".dockerignore").read_text().split()
    assert (ROOT / "demo" / "target" / "config.json").is_file()  # MODEL_DIR's default
