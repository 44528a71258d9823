"""compose.yaml and the Dockerfile: valid by the schema, and every command, flag, address, path and variable exists."""

import ast
import ipaddress
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.service.net.collector import collector_endpoint
from baton.service.observe import telemetry
from baton.service.settings import flat_fields
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings
from tests.support.process import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICES = COMPOSE["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("baton:"))
WORKERS = [name for name in OURS if name != "gateway"]
# Variables that others read: NVIDIA's driver and container runtime, Grafana.
OTHERS = re.compile(r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)|GF_[A-Z_]+")


def settings_of(service: str) -> type:
    return GatewaySettings if service == "gateway" else WorkerSettings


def test_valid_by_the_schema():
    program = Path(sys.executable).with_name("check-jsonschema")
    argv = [program, "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def modules() -> list[tuple[str, str]]:
    """(module, flag or "") of every `python -m` in it."""
    found = set()
    for service in SERVICES.values():
        for argv in (service.get("command", []), service.get("healthcheck", {}).get("test", [""])[1:]):
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
    return next(word.partition("=")[2] for word in SERVICES[service]["command"] if word.startswith(f"--{name}="))


@pytest.mark.parametrize("service", [name for name in WORKERS if SERVICES[name]["profiles"] == ["gpu"]])
def test_a_worker_on_a_gpu_never_falls_back_to_the_cpu(service):
    assert SERVICES[service]["environment"]["BATON_DEVICE"] == "cuda"


def locked(name: str) -> dict[str, str]:
    """Return the version of each package of a lock file."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["build", "cpu", "cuda"])
def test_every_locked_package_has_hashes(name):
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(locked(name)) and all("--hash=sha256:" in entry for entry in entries)
    assert DOCKERFILE.count("--require-hashes") == len(re.findall(r"--requirement /locks/", DOCKERFILE)) == 3


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_locks_satisfy_the_project(name):
    """Every dependency is in it, within its bounds; only the extra that the image wants is added."""
    found = locked(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + (project["optional-dependencies"]["gpu"] if name == "cuda" else [])
    for requirement in map(Requirement, asked):
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version}"


@pytest.mark.parametrize("machine, status", [("x86_64", 0), ("aarch64", 1)])
def test_on_another_architecture_the_build_says_what_to_do(tmp_path, machine, status):
    """Else pip finds no package of the hash that is locked."""
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {machine}\n")
    (tmp_path / "uname").chmod(0o755)
    (line,) = re.findall(r"^RUN (test .*uname.*)$", DOCKERFILE, re.MULTILINE)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)
    assert ran.returncode == status and ("DOCKER_DEFAULT_PLATFORM=linux/amd64" in ran.stderr) == bool(status)


def test_the_cpu_image_takes_a_cpu_build_of_torch():
    assert locked("cpu")["torch"].endswith("+cpu")
    assert not [name for name in locked("cpu") if name.startswith("nvidia-") or name == "triton"]


def test_the_cuda_image_has_flash_attention_of_the_version_that_is_told():
    """The form for CUDA 13 beside the usual torch; the lock and the table by driver agree."""
    asked = (ROOT / "deploy" / "locks" / "cuda.in").read_text()
    default = re.search(r"^flash-attn-4\S*", asked, re.MULTILINE)[0]
    assert locked("cuda")["flash-attn-4"] == default.partition("==")[2]
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"`{default}`" in page and f"`{default.replace('[cu13]', '')}`" in page
    assert SERVICES["decode_worker"]["build"]["args"]["LOCK"] == "${CUDA_LOCK:-cuda}"


@pytest.mark.parametrize("service", OURS)
def test_every_variable_is_read_by_the_code(service, monkeypatch):
    names = set(flat_fields(settings_of(service)))
    for name in SERVICES[service]["environment"]:
        known = name.startswith("BATON_") and name.removeprefix("BATON_").lower() in names
        monkeypatch.setenv(name, "http://collector")
        assert known or OTHERS.fullmatch(name) or collector_endpoint("TRACES") == "http://collector", name
        monkeypatch.delenv(name)


def test_every_variable_of_the_shell_has_a_default_that_env_repeats():
    given = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", (ROOT / "compose.yaml").read_text()))
    lines = [line for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")]
    told = dict(line.split("=", 1) for line in lines)
    assert told.pop("COMPOSE_PROFILES") in {
        profile for service in SERVICES.values() for profile in service.get("profiles", [])
    }
    assert set(told) <= set(given)
    assert told == {name: given[name] for name in told}


# ---- who speaks with whom ----


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_gateway_asks_for_the_workers_by_a_name_that_all_of_them_have(role):
    host, _, port = flag("gateway", f"{role}-workers").partition(":")
    for service in (f"{role}_worker", f"{role}_worker_cpu"):
        assert flag(service, "listen").rpartition(":")[2] == port
        assert SERVICES[service]["networks"]["default"]["aliases"] == [host]


def test_workers_that_register_may_be_dialled():
    """Workers of compose.yaml are found by name. A setting lets them register instead, and names their networks."""
    registers = [name for name in WORKERS if any(word.startswith("--gateways=") for word in SERVICES[name]["command"])]
    assert not registers or flag("gateway", "worker-networks")


def test_workers_can_be_scaled():
    """No name, address or port that only one container can have; each listens everywhere and is known by its own
    address."""
    for service in WORKERS:
        assert not {"container_name", "hostname", "ports"} & set(SERVICES[service])
        assert ipaddress.ip_address(flag(service, "listen").rpartition(":")[0]).is_unspecified


def test_health_checks_ask_where_the_process_listens():
    for service in OURS:
        port = flag(service, "listen").rpartition(":")[2]
        assert SERVICES[service]["healthcheck"]["test"][-1] == f"127.0.0.1:{port}"


def test_published_ports_are_listened_on_and_only_by_this_host():
    listened = {
        "gateway": [flag("gateway", "listen"), flag("gateway", "fleet-listen"), flag("gateway", "admin")],
        "prometheus": [":9090"],
        "grafana": [":3000"],
    }
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published.keys() == listened.keys()
    for name, ports in published.items():
        assert all(re.fullmatch(r"127\.0\.0\.1:\$\{[A-Z_]+:-(\d+)\}:\1", port) for port in ports)
        assert [port.rpartition(":")[2] for port in ports] == [each.rpartition(":")[2] for each in listened[name]]


def test_prometheus_scrapes_where_the_processes_listen():
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    aliases = {alias for name in WORKERS for alias in SERVICES[name]["networks"]["default"]["aliases"]}
    asked = [each for job in config["scrape_configs"] for each in job.get("dns_sd_configs", [])]
    ports = {flag(service, "admin").rpartition(":")[2] for service in OURS}
    assert {name for each in asked for name in each["names"]} >= {"gateway", *aliases}
    for each in asked:
        assert set(each["names"]) <= {"gateway", *aliases} and {str(each["port"])} == ports


def test_spans_go_to_the_collector_and_on_to_tempo():
    config = yaml.safe_load((ROOT / "deploy" / "otel" / "config.yaml").read_text())
    tempo = yaml.safe_load((ROOT / "deploy" / "tempo" / "tempo.yaml").read_text())
    takes = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    for service in OURS:
        assert SERVICES[service]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(f":-http://collector:{takes}}}")
    on = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert config["exporters"]["otlp/tempo"]["endpoint"] == f"tempo:{on}"
    made = {*config["receivers"], *config["connectors"], *config["processors"], *config["exporters"]}
    used = [each for pipeline in config["service"]["pipelines"].values() for part in pipeline.values() for each in part]
    assert made == set(used)
    keys = [
        policy["string_attribute"]
        for policy in config["processors"]["tail_sampling"]["policies"]
        if "string_attribute" in policy
    ]
    assert [each["key"] for each in keys] == ["baton.status"] and set(keys[0]["values"]) < set(telemetry._STATUSES)


def test_traces_are_judged_when_their_answers_have_ended():
    """A prefill's spans come long before. The page tells the time, and how many a second there may be."""
    config = yaml.safe_load((ROOT / "deploy" / "otel" / "config.yaml").read_text())
    sampling = config["processors"]["tail_sampling"]
    wait_s = int(sampling["decision_wait"].removesuffix("s"))
    assert wait_s >= 60 and sampling["num_traces"] >= 400 * wait_s
    assert f"`decision_wait` ({wait_s} s)" in (ROOT / "docs" / "operations.md").read_text()


def test_traces_that_wait_fit_into_the_collector():
    """A fifth below its limit it refuses spans of all, where `num_traces` lets the oldest go. It holds more than
    traces."""
    config = yaml.safe_load((ROOT / "deploy" / "otel" / "config.yaml").read_text())
    limit = config["processors"]["memory_limiter"]["limit_mib"] * 2**20
    assert config["processors"]["tail_sampling"]["num_traces"] * 11_200 < 0.75 * 0.8 * limit


def test_what_the_collector_makes_of_spans_is_scraped():
    collector = yaml.safe_load((ROOT / "deploy" / "otel" / "config.yaml").read_text())
    port = collector["exporters"]["prometheus"]["endpoint"].rpartition(":")[2]
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [each for job in jobs for config in job.get("static_configs", []) for each in config["targets"]]
    assert targets == [f"collector:{port}"]


def test_grafana_finds_its_sources_and_dashboards():
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    tempo = yaml.safe_load((ROOT / "deploy" / "tempo" / "tempo.yaml").read_text())["server"]["http_listen_port"]
    listened = {"prometheus": 9090, "tempo": tempo}
    sources = [
        source
        for path in (provisioning / "datasources").glob("*.yml")
        for source in yaml.safe_load(path.read_text())["datasources"]
    ]
    assert {source["url"] for source in sources} == {f"http://{name}:{port}" for name, port in listened.items()}
    for path in (provisioning / "dashboards").glob("*.yml"):
        for provider in yaml.safe_load(path.read_text())["providers"]:
            assert provider["options"]["path"] == mounts["./deploy/grafana/dashboards"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"


def test_workers_meet_in_one_volume():
    """The folder of --kv-socket-dir is the same volume in all of them, and made for their user in the image."""
    for service in WORKERS:
        folder = flag(service, "kv-socket-dir")
        assert f"kv:{folder}" in SERVICES[service]["volumes"]
        assert re.search(rf"install -d -o baton -m 0700 {folder}$", DOCKERFILE, re.MULTILINE)


def test_gpus_and_profiles():
    """CUDA IPC between containers needs one IPC and one PID namespace, and sight of each other's GPU."""
    for role, default in (("prefill", "0,1"), ("decode", "1,0")):
        worker, on_cpu = SERVICES[f"{role}_worker"], SERVICES[f"{role}_worker_cpu"]
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert worker["environment"]["CUDA_VISIBLE_DEVICES"] == f"${{{role.upper()}_GPUS:-{default}}}"
        assert worker["ipc"] == worker["pid"] == "host"
        assert (worker["profiles"], on_cpu["profiles"]) == (["gpu"], ["cpu"])
        assert not {"deploy", "ipc", "pid"} & set(on_cpu) and "shm_size" in on_cpu


@pytest.mark.parametrize("num_gpus", [4, 8])
def test_override_files_for_hosts_of_several_gpus(num_gpus):
    """A worker computes on each GPU, and sees all others for copies of KV."""
    path = ROOT / f"compose.{num_gpus}gpu.yaml"
    program = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [program, "--builtin-schema", "vendor.compose-spec", path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    services, own = yaml.safe_load(path.read_text())["services"], []
    for name, service in services.items():
        role = re.fullmatch(r"(prefill|decode)_worker(_\d+)?", name)[1]
        extends = {"extends": {"file": "compose.yaml", "service": f"{role}_worker"}} if name not in SERVICES else {}
        gpus = service["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert service == extends | {"environment": {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}}
        assert sorted(map(int, gpus)) == list(range(num_gpus))
        own.append(int(gpus[0]))
    assert sorted(own) == list(range(num_gpus))
    assert {"prefill_worker", "decode_worker"} <= set(services) and f"-f {path.name} up" in path.read_text()


# ---- what a container may do ----


@pytest.mark.parametrize("service", SERVICES)
def test_logs_are_bounded(service):
    """A gateway has a line for each request; Docker keeps all of them by default, and a full disk stops every
    container."""
    log = SERVICES[service]["logging"]
    assert log["driver"] == "json-file" and log["options"] == {"max-size": "50m", "max-file": "5"}


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_may_more_than_it_must(service):
    entry = SERVICES[service]
    assert entry["read_only"] is (entry.get("profiles") != ["gpu"])  # what sets a GPU up writes into the root
    assert entry["cap_drop"] == ["ALL"] and "no-new-privileges:true" in entry["security_opt"]
    assert not entry.get("privileged") and "cap_add" not in entry
    uid = entry.get("user", "image").partition(":")[0]
    if service in OURS:
        assert re.search(r"^USER baton$", DOCKERFILE, re.MULTILINE)
    elif service != "collector":  # whose image has a user of its own
        assert uid.isdecimal() and int(uid) > 0


def test_images_have_versions():
    for name, service in SERVICES.items():
        tag = service["image"].rpartition(":")[2]
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag) or (name in OURS and tag in ("cpu", "cuda"))


@pytest.mark.parametrize("service", OURS)
def test_grace_periods_are_longer_than_the_drain(service):
    drain_s = settings_of(service).drain_grace_s
    flushed_s = 2 * telemetry.FLUSH_S + 2  # spans and metrics, and gRPC's own grace
    assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) >= drain_s + flushed_s


# ---- files ----


def test_build_targets_and_files_exist():
    targets = set(re.findall(r"^FROM base AS (\w+)$", DOCKERFILE, re.MULTILINE))
    for service in OURS:
        build = SERVICES[service]["build"]
        assert build["target"] in targets and (ROOT / build["dockerfile"]).is_file()
        assert SERVICES[service]["image"] == f"baton:{build['target']}"
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists() and f"!{name}" in (ROOT / ".dockerignore").read_text().split()
    shipped = re.search(r"^SHIPPED = (\(.*?\))", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)[1]
    for name in ast.literal_eval(shipped):  # or our wheel is not built there
        assert re.search(rf"^COPY {name} /src/", DOCKERFILE, re.MULTILINE), name
    assert (ROOT / "demo" / "target" / "config.json").is_file()  # MODEL_DIR's default


def test_the_image_brings_what_the_code_asks_for():
    """Kernels of every tier in the wheel, a compiler where Triton wants one, and a home that the cache volume
    covers."""
    from baton.engine.native.build import cache_folder

    cpu, cuda = DOCKERFILE[DOCKERFILE.index("FROM base AS cpu") :].split("FROM base AS cuda")
    assert "BATON_WHEEL_FOR=$(uname -m)" in DOCKERFILE and "apt-get" not in cpu
    assert re.search(r"apt-get install .*\bgcc\b", cuda) and "--create-home baton" in DOCKERFILE
    assert cache_folder().is_relative_to(Path.home())
    assert all("cache:/home/baton" in SERVICES[service]["volumes"] for service in WORKERS)


def test_the_base_is_named_by_its_digest():
    base = re.search(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)[1]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)) <= stages | {"${PYTHON}"}


def test_every_file_and_volume_that_is_mounted_exists():
    for service in SERVICES.values():
        for source in (volume.partition(":")[0] for volume in service.get("volumes", []) if not volume.startswith("$")):
            assert (ROOT / source).exists() if source.startswith("./") else source in COMPOSE["volumes"], source


def test_secrets_are_made_by_one_command(tmp_path):
    """And every path below /run/secrets that something asks for is given to that service."""
    made = tmp_path / "secrets"
    subprocess.run([ROOT / "deploy" / "make-secrets", made], check=True, capture_output=True)
    of_callers = {"api-key", "operator.crt", "operator.key"}
    assert {path.name for path in made.iterdir()} == set(COMPOSE["secrets"]) | of_callers
    assert made.stat().st_mode & 0o777 == 0o700
    for name, secret in COMPOSE["secrets"].items():
        assert secret["file"].endswith(f"/{name}")
    for service in SERVICES.values():
        words = [str(word) for word in (*service.get("command", []), *service.get("environment", {}).values())]
        words += service.get("healthcheck", {}).get("test", [])
        asked = {name for word in words for name in re.findall(r"/run/secrets/([\w.-]+)", word)}
        if "gateway.toml" in asked:
            asked |= set(re.findall(r"/run/secrets/([\w.-]+)", (made / "gateway.toml").read_text()))
        assert asked == set(service.get("secrets", []))
        assert ("group_add" in service) == bool(service.get("secrets"))
    again = subprocess.run([ROOT / "deploy" / "make-secrets", made], capture_output=True, text=True)
    assert again.returncode == 1 and "exists" in again.stderr and not list(tmp_path.glob("secrets.*"))


@pytest.mark.parametrize("program", ["openssl", "chgrp"])
def test_secrets_that_could_not_be_made_whole_are_removed(tmp_path, program):
    """Also with a folder that is named from where the command is called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / program).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "deploy" / "make-secrets", "secrets"], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 1 and [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_what_is_secret_is_read_by_its_group_alone(tmp_path):
    made, gid = tmp_path / "secrets", os.getgid() if os.getuid() else 10001
    done = subprocess.run([ROOT / "deploy" / "make-secrets", made], check=True, capture_output=True, text=True)
    for path in made.iterdir():
        of_caller = path.name in ("api-key", "operator.key")
        mode = 0o444 if path.suffix == ".crt" else 0o400 if of_caller else 0o440
        assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (mode, gid), path.name
    assert (f"SECRETS_GID={gid}" in done.stderr) == (gid != 10001)
    assert "SECRETS_GID=10001" in (ROOT / ".env").read_text()


@pytest.mark.skipif(os.getuid() != 0, reason="takes the users of containers, which only root can")
def test_the_users_of_containers_read_what_they_are_shown(tmp_path):
    """Each file on its own, as a container sees it: the folder above is not theirs to enter."""
    made = tmp_path / "secrets"
    subprocess.run([ROOT / "deploy" / "make-secrets", made], check=True, capture_output=True)

    made.chmod(0o711)

    def refusal(name: str, uid: int, groups: list[int]) -> str:
        """Return why cat does not read the file; empty if it does."""
        # Not subprocess's `user`: that takes a fork, where children of a process with gRPC's threads die of SIGSEGV.
        groups_flag = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
        argv = ["setpriv", f"--reuid={uid}", "--regid=1", groups_flag, "cat", name]
        ended = subprocess.run(argv, cwd=made, capture_output=True, text=True)
        return f"status {ended.returncode}: {ended.stderr}" if ended.returncode else ""

    for service in SERVICES.values():
        uid = int(service.get("user", "10001").partition(":")[0])
        for name in service.get("secrets", []):
            assert not (why := refusal(name, uid, [10001])), f"{name} as {uid}: {why}"
            assert bool(refusal(name, uid, [])) != name.endswith(".crt"), (name, uid)
    assert refusal("api-key", 10001, [10001])
