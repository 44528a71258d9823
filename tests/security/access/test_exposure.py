"""Settings that a process refuses to start with: an open port beyond loopback, or half of a protection. One line
each."""

import subprocess
import sys

import pytest

from baton.service.settings import SettingsError, load_settings
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings

GATEWAY = {"model": "m", "decode_workers": "127.0.0.1:1"}
WORKER = {"model": "m"}
TLS = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
KEYS = {"credentials": "f", "cluster_secret": "s"}
BEYOND = {"listen": "0.0.0.0:50051"}

REFUSED = [
    (GatewaySettings, {**BEYOND, "cluster_secret": "s"}, "--listen 0.0.0.0:50051: beyond loopback this needs"),
    (GatewaySettings, {**BEYOND, **KEYS}, "beyond loopback this needs"),
    (GatewaySettings, {"listen": "[::]:50051", **KEYS}, "beyond loopback this needs"),
    (GatewaySettings, {"listen": "example.net:50051", **KEYS}, "beyond loopback this needs"),
    (GatewaySettings, {"listen": "127.example.net:50051", **KEYS}, "beyond loopback this needs"),
    (GatewaySettings, TLS, "--credentials is missing"),
    (GatewaySettings, {"credentials": "f"}, "--cluster-secret is missing"),
    (GatewaySettings, {"tls_cert": "c", **KEYS}, "--tls-key is missing"),
    (GatewaySettings, {"fleet_listen": "127.0.0.1:0"}, "--fleet-listen has no effect"),
    (GatewaySettings, {"admin": "0.0.0.0:9464"}, "--admin 0.0.0.0:9464"),
    (GatewaySettings, {**BEYOND, **TLS, **KEYS, "admin": "0.0.0.0:9464"}, "--open-admin"),
    (WorkerSettings, BEYOND, "beyond loopback this needs --tls-cert, --tls-key and --tls-ca"),
    (WorkerSettings, {"admin": "10.0.0.1:9464"}, "--open-admin"),
    (WorkerSettings, {**BEYOND, **TLS, "transports": "shm,tcp"}, "--transports tcp: is in plain text"),
    (WorkerSettings, {**BEYOND, **TLS, "transports": "nixl"}, "--transports nixl: is in plain text"),
]
ALLOWED = [
    (GatewaySettings, {}),
    (GatewaySettings, {"listen": "[::1]:0"}),
    (GatewaySettings, {"listen": "127.8.9.10:0"}),
    (GatewaySettings, KEYS),  # keys without TLS are for tests on one host
    (GatewaySettings, {**BEYOND, **TLS, **KEYS}),
    (GatewaySettings, {**BEYOND, "cluster_secret": "s", "insecure": "true"}),
    (GatewaySettings, {**BEYOND, **TLS, **KEYS, "admin": "0.0.0.0:9464", "open_admin": "true"}),
    (GatewaySettings, {**TLS, **KEYS, "fleet_listen": "10.0.0.1:50052"}),
    (WorkerSettings, {}),
    (WorkerSettings, {**BEYOND, **TLS}),
    (WorkerSettings, {**BEYOND, "insecure": "true"}),
    (WorkerSettings, {**BEYOND, **TLS, "transports": "tcp", "insecure_kv": "true"}),
    (WorkerSettings, {**TLS, "transports": "tcp"}),  # it stays on this host
]


def load(cls, values):
    return load_settings(cls, {**(GATEWAY if cls is GatewaySettings else WORKER), **values}, env={})


@pytest.mark.parametrize("cls, values, words", REFUSED, ids=[f"{i}-{row[2][:20]}" for i, row in enumerate(REFUSED)])
def test_refused_in_one_line(cls, values, words):
    with pytest.raises(SettingsError) as caught:
        load(cls, values)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("cls, values", ALLOWED)
def test_protected_ports_are_allowed(cls, values):
    load(cls, values)


def test_auto_leaves_out_what_is_in_plain_text():
    assert load(WorkerSettings, {**BEYOND, **TLS}).refused_transports == ("nixl", "tcp")
    for values in ({}, TLS, {**BEYOND, "insecure": "true"}, {**BEYOND, **TLS, "insecure_kv": "true"}):
        assert not load(WorkerSettings, values).refused_transports


@pytest.mark.parametrize("module", ["gateway", "decode_worker"])
@pytest.mark.parametrize("flag", ["--listen=0.0.0.0:0", "--admin=0.0.0.0:0", "--tls-cert=x"])
def test_the_process_ends_with_2(module, flag):
    argv = [sys.executable, "-m", module, "--model=m", flag]
    argv += ["--decode-workers=127.0.0.1:1", "--cluster-secret=x"] if module == "gateway" else []
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert flag.partition("=")[0][:5] in done.stderr
