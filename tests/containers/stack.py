"""compose.yaml's CPU profile, run by docker-compose from a copy that leaves out what this engine lacks."""

import json
import os
import socket
import subprocess
import urllib.request
from pathlib import Path

import yaml

from baton.client import Client
from tests.containers.engine import Engine
from tests.containers.images import ROOT
from tests.support.pace import patience
from tests.support.waiting import until

OURS = ("redis", "prefill_worker_cpu", "decode_worker_cpu", "gateway", "prometheus", "collector")
PORTS = ("PORT", "FLEET_PORT", "ADMIN_PORT", "PROMETHEUS_PORT", "PORT_2", "FLEET_PORT_2", "ADMIN_PORT_2")


def copy_of_compose(folder: Path) -> dict:
    """compose.yaml, resolved, less tempo and Grafana; Debian's Redis and Prometheus, a collector of our own, a second
    gateway.

    Of our services nothing else is changed but `start_interval`, `required` and `profiles`, which docker-compose 1.29
    does not know."""
    document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    services = {name: service for name, service in document["services"].items() if name in OURS}
    for service in services.values():
        service.pop("profiles", None)
        service.get("healthcheck", {}).pop("start_interval", None)
        waits = service.get("depends_on", {})
        if isinstance(waits, dict):
            service["depends_on"] = {
                name: {"condition": each["condition"]} for name, each in waits.items() if name in services
            }
        else:
            service["depends_on"] = [name for name in waits if name in services]
    services["redis"]["image"] = "baton-test/redis"
    services["prometheus"]["image"] = "baton-test/prometheus"
    services["collector"] |= {
        "image": "baton:cpu",
        "command": ["python", "/collector.py", "/kept/kept.json"],
        "volumes": [f"{ROOT}/tests/containers/collector.py:/collector.py:ro", f"{folder}/kept:/kept"],
    }
    again = yaml.safe_load(yaml.safe_dump(services["gateway"]))
    again["ports"] = [port.replace("PORT:-", "PORT_2:-") for port in again["ports"]]
    services["gateway_2"] = again
    for service in services.values():
        service.pop("build", None)
    return {
        "services": services,
        "volumes": {name: {} for name in ("kv", "cache", "prometheus")},
        "secrets": document["secrets"],
    }


class Stack:
    """The running stack. `secrets` is what deploy/make-secrets wrote."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.folder = engine, folder
        folder.mkdir(parents=True)
        (folder / "kept").mkdir()
        os.chown(folder / "kept", 10001, 10001)
        self.secrets = folder / "secrets"
        subprocess.run([ROOT / "deploy" / "make-secrets", self.secrets], check=True, capture_output=True)
        self.ports = _free_ports()
        lines = (ROOT / ".env").read_text().splitlines()
        told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        told |= {"SECRETS_DIR": str(self.secrets), "MODEL_DIR": f"{ROOT}/demo/target"}
        told |= {name: str(port) for name, port in self.ports.items()}
        (folder / ".env").write_text(
            "".join(f"{name}={value}\n" for name, value in told.items() if "COMPOSE" not in name)
        )
        text = yaml.safe_dump(copy_of_compose(folder)).replace("./deploy/", f"{ROOT}/deploy/")
        (folder / "compose.yaml").write_text(text)

    def compose(self, *argv: str, check: bool = True, timeout: float = 300) -> str:
        command = ["docker-compose", "--project-name", "batontest", "--file", "compose.yaml", *argv]
        return self.engine.run(command, cwd=self.folder, check=check, timeout=patience(timeout))

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        return self.compose("ps", "--quiet", service).split()

    def health(self, service: str) -> list[str]:
        states = [self.engine.inspect(each)["State"] for each in self.containers(service)]
        return [state.get("Health", {}).get("Status", state["Status"]) for state in states]

    def wait_healthy(self, *services: str, timeout_s: float = 240) -> None:
        for service in services:
            until(lambda: set(self.health(service)) == {"healthy"}, lambda: self.logs(service), timeout_s, pause_s=0.25)

    def logs(self, service: str, *argv: str) -> str:
        return self.compose("logs", "--no-color", *argv, service)[-6000:]

    def client(self, *names: str, **more) -> Client:
        """A client of the gateways whose published ports are named, with the tenant's key."""
        target = ",".join(f"127.0.0.1:{self.ports[name]}" for name in names or ("PORT",))
        key = (self.secrets / "api-key").read_text().strip()
        return Client(target, **{"api_key": key, "tls_ca": self.secrets / "ca.crt", "timeout_s": patience(120), **more})

    def metric(self, name: str, port: str = "ADMIN_PORT") -> float:
        """Return the sum of a gateway's metric over its labels."""
        return total(f"127.0.0.1:{self.ports[port]}", name)

    def admin_of(self, container: str) -> str:
        """Return where this host reaches the pages of a container that publishes no port."""
        (network,) = self.engine.inspect(container)["NetworkSettings"]["Networks"].values()
        return f"{network['IPAddress']}:9464"

    def prometheus(self, path: str) -> dict:
        return json.loads(_get(f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/{path}"))["data"]

    def kept(self) -> dict[str, dict[str, int]]:
        """Return what the collector has got."""
        return json.loads((self.folder / "kept" / "kept.json").read_text())

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5", check=False)


def total(admin: str, name: str) -> float:
    """Return the sum of a process's metric over its labels."""
    lines = _get(f"http://{admin}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].split(" ")[0] == name)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def _free_ports() -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = {name: each.getsockname()[1] for name, each in zip(PORTS, sockets, strict=True)}
    for each in sockets:
        each.close()
    return found
