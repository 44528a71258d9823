"""Makes what the chart's pods keep secret, as Secrets of the namespace, by `baton certs`; what exists is left as it is.

A Job runs it before an installation and before an upgrade. Secrets of a set fit only together, and the authority's key
is thrown away: a draft, one Secret with all of a set, comes first, so that a run goes on where the one before it was
cut off. Redis has an authority of its own: with its key nobody passes for a gateway or a worker.
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
from collections.abc import Callable, Sequence
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

    def get(self, name: str) -> dict[str, bytes] | None:
        """Return a Secret's files, None where there is no such Secret."""
        try:
            found = self._call("GET", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return {key: base64.b64decode(value) for key, value in found["data"].items()}

    def create(self, name: str, secret: dict) -> bool:
        """Return whether it is new: one that is there stays as it is."""
        labels = {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": os.environ["INSTANCE"]}
        metadata = {"name": name, "labels": labels}
        try:
            self._call("POST", "", {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **secret})
        except urllib.error.HTTPError as error:
            if error.code == 409:
                return False
            raise
        return True

    def delete(self, name: str) -> None:
        self._call("DELETE", f"/{name}")

    def _call(self, method: str, path: str, body: dict | None = None) -> dict:
        token = (ACCOUNT / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return json.load(answer)


def certs(folder: Path, hosts: list[str]) -> Path:
    """Run `baton certs`."""
    flags = [flag for host in hosts for flag in ("--host", host)]
    argv = [sys.executable, "-m", "baton.cli.main", "certs", "--out", folder, "--days", os.environ["DAYS"], *flags]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def make_secret(kind: str, files: dict[str, bytes]) -> dict:
    return {"type": kind, "data": {key: base64.b64encode(value).decode() for key, value in files.items()}}


def tls(made: Path, role: str) -> dict:
    """Return a Secret of a certificate under the keys that cert-manager gives them."""
    names = {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"}
    return make_secret("kubernetes.io/tls", {key: (made / name).read_bytes() for key, name in names.items()})


def redis_files(host: str) -> tuple[bytes, bytes]:
    """Return the access list of Redis, and the settings by which gateways reach it."""
    password = secrets.token_hex(24)
    digest = hashlib.sha256(password.encode()).hexdigest()
    acl = "user default on nopass resetkeys resetchannels -@all +ping\n"
    acl += f"user baton on #{digest} ~kv:* ~baton:* resetchannels -@all {COMMANDS}\n"
    url = f"rediss://baton:{password}@{host}:6379/0?ssl_ca_certs=/run/secrets/redis/ca.crt"
    return acl.encode(), f'redis = "{url}"\n'.encode()


def make_certificates(name: str, folder: Path) -> dict[str, dict]:
    """Return Secrets by name."""
    fleet = certs(folder / "fleet", os.environ["HOSTS"].split(","))
    redis = certs(folder / "redis", [f"{name}-redis"])
    return {f"{name}-{role}-tls": tls(fleet, role) for role in ROLES} | {f"{name}-redis-tls": tls(redis, "gateway")}


def make_credentials(name: str, folder: Path) -> dict[str, dict]:
    """Return Secrets by name."""
    made = certs(folder / "fleet", os.environ["HOSTS"].split(","))
    acl, gateway = redis_files(f"{name}-redis")
    key = {each: (made / each).read_bytes() for each in ("api-key", "cluster-secret", "credentials.toml")}
    return {
        f"{name}-caller": make_secret("Opaque", {"api-key": key.pop("api-key")}),
        f"{name}-redis": make_secret("Opaque", {"redis.acl": acl}),
        f"{name}-gateway": make_secret("Opaque", {**key, "gateway.toml": gateway}),
    }


def complete(
    namespace: Namespace,
    draft: str,
    mounted: list[str],
    make: Callable[[Path], dict[str, dict]],
    beside: Sequence[str] = (),
    readers: Sequence[str] = (),
) -> None:
    """Create the Secrets of a set unless those that pods mount are there. `beside`: the others of the set. `readers`:
    what reads them when it starts alone."""
    if namespace.get(draft) is None:
        missing = [each for each in mounted if namespace.get(each) is None]
        if not missing:
            return
        if present := [each for each in (*mounted, *beside) if namespace.get(each) is not None]:
            message = "missing: {}; new ones would not fit what is there: delete {} too, and all are made anew"
            if readers:
                message += f"; then `kubectl rollout restart {' '.join(readers)}`, which have read the old ones"
            sys.exit(message.format(" ".join(missing), " ".join(present)))
        with tempfile.TemporaryDirectory() as folder:
            texts = {each: json.dumps(secret).encode() for each, secret in make(Path(folder)).items()}
        namespace.create(draft, make_secret("Opaque", texts))
    for each, text in namespace.get(draft).items():  # of the Job that was first, where two run
        if namespace.create(each, json.loads(text)):
            print(f"created {each}")
    namespace.delete(draft)


def main() -> None:
    namespace, name = Namespace(), os.environ["NAME"]
    asked = os.environ["MAKE"].split(",")
    if "certificates" in asked:
        mounted = [f"{name}-{role}-tls" for role in (*ROLES, "redis")]
        complete(namespace, f"{name}-certificates-draft", mounted, lambda folder: make_certificates(name, folder))
    if "credentials" in asked:
        mounted = [f"{name}-gateway", f"{name}-redis"]
        draft, beside = f"{name}-credentials-draft", [f"{name}-caller"]
        readers = [f"deployment/{name}-redis", f"deployment/{name}-gateway"]
        complete(namespace, draft, mounted, lambda folder: make_credentials(name, folder), beside, readers)


if __name__ == "__main__":
    main()
