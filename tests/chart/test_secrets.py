"""The program of the chart's Job, run against an API server that keeps Secrets: what it makes, product and Redis take."""

import base64
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509

from baton.service.security.credentials import Credentials
from tests.chart.rendering import CHART, ROOT, container, pods, render
from tests.support.redis_server import redis_path

PROGRAM = CHART / "files" / "make_secrets.py"


class ApiServer:
    """The paths of Secrets: GET of one, POST of a new one."""

    def __init__(self):
        self.secrets: dict[str, dict] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):
                assert self.headers["Authorization"] == "Bearer token"
                self.answer(200 if self.path.rpartition("/")[2] in outer.secrets else 404)

            def do_POST(self):
                assert self.path == "/api/v1/namespaces/llm/secrets"
                secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = secret["metadata"]["name"] in outer.secrets
                if not known:
                    outer.secrets[secret["metadata"]["name"]] = secret
                self.answer(409 if known else 201)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> "ApiServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self._server.shutdown()
        self._server.server_close()

    def file(self, secret: str, key: str) -> bytes:
        return base64.b64decode(self.secrets[f"rel-baton-{secret}"]["data"][key])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The API server after the Job of the default values has run twice."""
    account = tmp_path_factory.mktemp("account")
    (account / "namespace").write_text("llm")
    (account / "token").write_text("token")
    job = container(dict(pods(render({})))["secrets"])
    with ApiServer() as server:
        told = {each["name"]: each["value"] for each in job["env"]}
        told |= {"SERVICE_ACCOUNT": str(account), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        told |= {"KUBERNETES_SERVICE_PORT": str(server.port)}
        for count in (8, 0):
            argv, environment = [sys.executable, PROGRAM], {**os.environ, **told}
            done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
            assert done.stdout.count("created") == count
        yield server


def test_the_secrets_that_pods_mount(made):
    roles = {f"rel-baton-{role}-tls" for role in ("gateway", "prefill", "decode", "operator", "redis")}
    assert made.secrets.keys() == roles | {"rel-baton-gateway", "rel-baton-redis", "rel-baton-caller"}
    assert all(set(made.secrets[name]["data"]) == {"tls.crt", "tls.key", "ca.crt"} for name in roles)


def test_certificates_have_the_names_that_cert_manager_is_asked_for(made):
    """Of each role, and of the gateway those at which clients reach it."""
    asked = {
        each["metadata"]["name"].removeprefix("rel-baton-").removesuffix("-tls"): set(each["spec"]["dnsNames"])
        for each in render({"secrets": {"certificates": "cert-manager"}})
        if each["kind"] == "Certificate" and each["metadata"]["name"].endswith("-tls")
    }
    for role, names in asked.items():
        certificate = x509.load_pem_x509_certificate(made.file(f"{role}-tls", "tls.crt"))
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns = set(found.get_values_for_type(x509.DNSName))
        assert names <= dns if role == "redis" else names == dns, role


def test_redis_has_an_authority_of_its_own(made):
    assert made.file("redis-tls", "ca.crt") != made.file("gateway-tls", "ca.crt")
    assert len({made.file(f"{role}-tls", "ca.crt") for role in ("gateway", "prefill", "decode", "operator")}) == 1


def test_the_api_key_is_in_the_credentials(made, tmp_path):
    (tmp_path / "credentials.toml").write_bytes(made.file("gateway", "credentials.toml"))
    key = made.file("caller", "api-key").decode().strip()
    assert Credentials(tmp_path / "credentials.toml").tenant(key) == "main"


def test_redis_takes_its_files_and_gateways_reach_it(made, tmp_path):
    """The access list is deploy/make-secrets' own, and a real Redis reads it."""
    line = next(each for each in made.file("redis", "redis.acl").decode().splitlines() if "baton" in each)
    told = (ROOT / "deploy" / "make-secrets").read_text()
    assert re.sub(r"#\w+", "#$hash", line) == re.search(r"^user baton .*$", told, re.MULTILINE)[0]
    url = tomllib.loads(made.file("gateway", "gateway.toml").decode())["redis"]
    assert url.startswith("rediss://baton:") and url.endswith(
        "@rel-baton-redis:6379/0?ssl_ca_certs=/run/secrets/redis/ca.crt"
    )
    (tmp_path / "redis.acl").write_bytes(made.file("redis", "redis.acl"))
    for each in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / each).write_bytes(made.file("redis-tls", each))
    argv = [redis_path(), "--port", "0", "--unixsocket", tmp_path / "s", "--aclfile", tmp_path / "redis.acl"]
    with subprocess.Popen([*argv, "--save", ""], stdout=subprocess.PIPE, text=True) as process:
        try:
            said = []
            for text in process.stdout:
                said.append(text)
                if "ready to accept" in text.lower():
                    break
            assert "ready to accept" in said[-1].lower(), said
            import redis

            client = redis.Redis(
                unix_socket_path=str(tmp_path / "s"), username="baton", password=url[15:].partition("@")[0]
            )
            assert client.set("kv:x", "1") and client.get("kv:x") == b"1"
        finally:
            process.terminate()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")


def test_the_program_needs_nothing_but_python_and_baton():
    spec = importlib.util.spec_from_file_location("make_secrets", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert Path(module.__file__) == PROGRAM and module.ROLES == ("gateway", "prefill", "decode", "operator")
