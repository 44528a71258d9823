"""Makes what the chart's pods keep secret, as Secrets of the namespace, by `baton certs`; what exists is left as it is.

A Job runs it before an installation and before an upgrade. Redis has an authority of its own: with its key nobody passes for a
gateway or a worker.
"""

import base64
import hashlib
import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
ROLES = ("gateway", "prefill", "decode", "operator")
COMMANDS = (
    "+get +set +mget +setbit +expire +ping +multi +exec +discard +select +client|setname +hello +time +getrange +zadd +zmscore "
    "+zrange +zscan +zremrangebyscore"
)


class Namespace:
    """Secrets of this pod's namespace, through the API server."""

    def __init__(self):
        self._name = (ACCOUNT / "namespace").read_text().strip()
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        scheme = "https" if (ACCOUNT / "ca.crt").exists() else "http"
        self._url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/api/v1/namespaces/{self._name}/secrets"
        self._context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt") if scheme == "https" else None

    def has(self, name: str) -> bool:
        try:
            self._call("GET", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return False
            raise
        return True

    def create(self, name: str, kind: str, files: dict[str, bytes]) -> None:
        """One that another Job has created meanwhile stays as it is."""
        data = {key: base64.b64encode(value).decode() for key, value in files.items()}
        labels = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": os.environ["INSTANCE"]}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": kind, "data": data}
        try:
            self._call("POST", "", {**secret, "metadata": {"name": name, "labels": labels}})
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise
        print(f"created {name}")

    def _call(self, method: str, path: str, body: dict | None = None) -> None:
        token = (ACCOUNT / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        urllib.request.urlopen(request, timeout=30, context=self._context).close()


def certs(folder: Path, hosts: list[str], days: str) -> Path:
    """Run `baton certs`."""
    flags = [flag for host in hosts for flag in ("--host", host)]
    argv = [sys.executable, "-m", "baton.cli.main", "certs", "--out", folder, "--days", days, *flags]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def tls(made: Path, role: str) -> dict[str, bytes]:
    """Return a certificate under the keys that cert-manager gives them."""
    names = {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"}
    return {key: (made / name).read_bytes() for key, name in names.items()}


def redis_files(host: str) -> tuple[bytes, bytes]:
    """Return the access list of Redis, and the settings by which gateways reach it."""
    password = secrets.token_hex(24)
    digest = hashlib.sha256(password.encode()).hexdigest()
    acl = "user default on nopass resetkeys resetchannels -@all +ping\n"
    acl += f"user baton on #{digest} ~kv:* ~baton:* resetchannels -@all {COMMANDS}\n"
    url = f"rediss://baton:{password}@{host}:6379/0?ssl_ca_certs=/run/secrets/redis/ca.crt"
    return acl.encode(), f'redis = "{url}"\n'.encode()


def main() -> None:
    namespace, name = Namespace(), os.environ["NAME"]
    asked = os.environ["MAKE"].split(",")
    with tempfile.TemporaryDirectory() as folder:
        hosts, days = os.environ["HOSTS"].split(","), os.environ["DAYS"]
        made = certs(Path(folder) / "fleet", hosts, days)
        if "certificates" in asked and not all(namespace.has(f"{name}-{role}-tls") for role in ROLES):
            for role in ROLES:
                namespace.create(f"{name}-{role}-tls", "kubernetes.io/tls", tls(made, role))
            redis = certs(Path(folder) / "redis", [f"{name}-redis"], days)
            namespace.create(f"{name}-redis-tls", "kubernetes.io/tls", tls(redis, "gateway"))
        if "credentials" in asked and not namespace.has(f"{name}-gateway"):
            acl, gateway = redis_files(f"{name}-redis")
            key = {each: (made / each).read_bytes() for each in ("cluster-secret", "credentials.toml")}
            namespace.create(f"{name}-caller", "Opaque", {"api-key": (made / "api-key").read_bytes()})
            namespace.create(f"{name}-redis", "Opaque", {"redis.acl": acl})
            namespace.create(f"{name}-gateway", "Opaque", {**key, "gateway.toml": gateway})


if __name__ == "__main__":
    main()
