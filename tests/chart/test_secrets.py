"""The program of the chart's Job, run against an API server that keeps Secrets: what it makes, product and Redis
take."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509

from baton.service.security.credentials import Credentials
from tests.chart.rendering import CHART, ROOT, container, named, pods, render
from tests.support.redis_server import redis_path

PROGRAM = CHART / "files" / "make_secrets.py"


class ApiServer:
    """The paths of Secrets: GET and DELETE of one, POST of a new one.

    `flaky`: each is first answered by an error where it changes anything, every second time after the change.
    """

    def __init__(self, secrets: dict[str, dict] | None = None, flaky: bool = False):
        self.secrets = secrets or {}
        failed: set[tuple[str, str]] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, body: dict | None = None) -> None:
                data = json.dumps(body or {}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                assert self.headers["Authorization"] == "Bearer token"
                secret = outer.secrets.get(self.path.rpartition("/")[2])
                self.answer(200 if secret else 404, secret)

            def do_POST(self):
                assert self.path == "/api/v1/namespaces/llm/secrets"
                secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = secret["metadata"]["name"]
                self.change(name, 409 if name in outer.secrets else 201, lambda: outer.secrets.setdefault(name, secret))

            def do_DELETE(self):
                name = self.path.rpartition("/")[2]
                self.change(name, 200 if name in outer.secrets else 404, lambda: outer.secrets.pop(name, None))

            def change(self, name: str, status: int, change: Callable[[], object]) -> None:
                fails = flaky and (self.command, name) not in failed
                if not fails or len(failed) % 2:
                    change()
                if fails:
                    failed.add((self.command, name))
                self.answer(500 if fails else status)

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
def run_job(tmp_path_factory):
    """Run the Job of the default values once, against a server."""
    account = tmp_path_factory.mktemp("account")
    (account / "namespace").write_text("llm")
    (account / "token").write_text("token")
    job = container(dict(pods(render({})))["secrets"])
    told = {each["name"]: each["value"] for each in job["env"]}
    told |= {"SERVICE_ACCOUNT": str(account), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}

    def run(server: ApiServer) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **told, "KUBERNETES_SERVICE_PORT": str(server.port)}
        return subprocess.run([sys.executable, PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True)

    return run


@pytest.fixture(scope="module")
def made(run_job):
    """The API server after the Job has run twice."""
    with ApiServer() as server:
        for count in (8, 0):
            done = run_job(server)
            assert (done.returncode, done.stdout.count("created")) == (0, count), done.stderr
        yield server


def check(server: ApiServer, folder: Path) -> None:
    """Hold Secrets against one another: all are there, of one authority, one API key and one password of Redis."""
    roles = {f"rel-baton-{role}-tls" for role in ("gateway", "prefill", "decode", "operator", "redis")}
    assert server.secrets.keys() == roles | {"rel-baton-gateway", "rel-baton-redis", "rel-baton-caller"}
    assert all(set(server.secrets[name]["data"]) == {"tls.crt", "tls.key", "ca.crt"} for name in roles)
    assert len({server.file(f"{role}-tls", "ca.crt") for role in ("gateway", "prefill", "decode", "operator")}) == 1
    (folder / "credentials.toml").write_bytes(server.file("gateway", "credentials.toml"))
    key = server.file("caller", "api-key").decode().strip()
    assert Credentials(folder / "credentials.toml").tenant(key) == "main"
    password = tomllib.loads(server.file("gateway", "gateway.toml").decode())["redis"][15:].partition("@")[0]
    assert f"#{hashlib.sha256(password.encode()).hexdigest()} " in server.file("redis", "redis.acl").decode()


def test_the_secrets_fit_together(made, tmp_path):
    check(made, tmp_path)


def test_a_job_that_is_cut_off_anywhere_is_gone_on_with(run_job, tmp_path):
    """Each Secret that is made or deleted fails once, and the next run makes the rest of the same authority and
    keys."""
    with ApiServer(flaky=True) as server:
        runs = [run_job(server)]
        while runs[-1].returncode and len(runs) < 20:
            runs.append(run_job(server))
        assert len(runs) == 13, runs[-1].stderr  # eight Secrets, and two drafts that come and go
        check(server, tmp_path)


def test_what_no_longer_fits_is_named(made, run_job):
    """Another certificate would be another authority's."""
    with ApiServer(dict(made.secrets)) as server:
        del server.secrets["rel-baton-prefill-tls"]
        before = dict(server.secrets)
        done = run_job(server)
        assert done.returncode and server.secrets == before
        assert done.stderr == (
            "missing: rel-baton-prefill-tls; new ones would not fit what is there: delete rel-baton-gateway-tls "
            "rel-baton-decode-tls rel-baton-operator-tls rel-baton-redis-tls too, and all are made anew\n"
        )


def test_a_key_that_would_be_refused_is_named(made, run_job, tmp_path):
    """The key of callers is made with what the gateway knows of it, and that with the password of Redis."""
    with ApiServer(dict(made.secrets)) as server:
        for missing, others in (
            (["rel-baton-gateway"], "rel-baton-redis rel-baton-caller"),
            (["rel-baton-gateway", "rel-baton-redis"], "rel-baton-caller"),
        ):
            for name in missing:
                server.secrets.pop(name, None)
            done = run_job(server)
            assert done.returncode and f"missing: {' '.join(missing)}; " in done.stderr
            assert f": delete {others} too," in done.stderr
            restart = "kubectl rollout restart deployment/rel-baton-redis deployment/rel-baton-gateway"
            assert done.stderr.endswith(f"; then `{restart}`, which have read the old ones\n")
        del server.secrets["rel-baton-caller"]
        assert run_job(server).stdout.count("created") == 3
        check(server, tmp_path)


def test_the_callers_key_may_be_taken_away(made, run_job):
    """No pod mounts it."""
    with ApiServer(dict(made.secrets)) as server:
        del server.secrets["rel-baton-caller"]
        assert (run_job(server).returncode, "rel-baton-caller" in server.secrets) == (0, False)


def test_the_job_may_what_it_does(made):
    """Read what it asks for, delete its drafts."""
    rules = named(render({}), "Role", "secrets")["rules"]
    names: dict[str, set[str]] = {}
    for rule in rules:
        for verb in rule["verbs"]:
            names.setdefault(verb, set()).update(rule.get("resourceNames", []))
    drafts = {"rel-baton-certificates-draft", "rel-baton-credentials-draft"}
    assert names == {"create": set(), "get": made.secrets.keys() | drafts, "delete": drafts}


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
