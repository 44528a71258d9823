"""The HTTP port asks for the same keys as the gRPC one, and speaks TLS with the same certificates."""

import asyncio
import contextlib
import shutil
import socket
import ssl

import anthropic
import openai
import pytest

from baton.service.net.http_server import open_http
from baton.service.security.credentials import Credentials
from baton.service.security.guard import Guard
from gateway.config.settings import GatewaySettings
from gateway.http.app import make_app, refuse_head
from tests.gateway.conftest import cluster, digest, folder  # noqa: F401
from tests.support.pace import patience

CHAT = "/baton.v1.Inference/Generate"


@pytest.fixture
def http_keys(cluster, installation):  # noqa: F811
    """`async with http_keys(tls) as (guard, client)`; `client(api_key)` is OpenAI's."""

    @contextlib.asynccontextmanager
    async def start(tls=None):
        async with cluster() as c:
            guard = Guard(Credentials(installation.folder / "credentials.toml"))
            server = open_http("127.0.0.1:0", make_app(c.gateway.handler, guard), refuse_head, tls)
            server.start()

            def client(api_key: str) -> openai.AsyncOpenAI:
                trusted = ssl.create_default_context(cafile=installation.folder / "ca.crt")
                http = openai.DefaultAsyncHttpxClient(verify=trusted)
                url = f"{'https' if tls else 'http'}://localhost:{server.port}/v1"
                options = {"max_retries": 0, "timeout": patience(20), "http_client": http}
                return openai.AsyncOpenAI(base_url=url, api_key=api_key, **options)

            try:
                yield guard, client
            finally:
                await server.stop()

    return start


async def test_a_key_opens_and_another_does_not(http_keys, installation):
    async with http_keys() as (guard, client), client(installation.api_key) as known, client("baton.x.y") as unknown:
        answer = await known.completions.create(model="fake", prompt=[20, 21], max_tokens=2)
        assert answer.usage.completion_tokens == 2
        with pytest.raises(openai.AuthenticationError, match="not known here") as caught:
            await unknown.completions.create(model="fake", prompt=[20, 21], max_tokens=2)
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await unknown.models.list()
        assert guard.num_denied[CHAT, "UNAUTHENTICATED"] == 1 and not guard.slots._num_open


async def test_anthropic_s_clients_show_it_in_their_own_header(http_keys, installation):
    ask = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "a fox"}]}
    async with http_keys() as (_, client):
        url = str(client("none").base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(base_url=url, api_key=installation.api_key, max_retries=0) as known:
            shown = {"authorization": f"Bearer {installation.api_key}", "x-api-key": installation.api_key}
            for headers in ({}, shown):
                assert (await known.messages.create(**ask, extra_headers=headers)).usage.output_tokens == 2
            with pytest.raises(anthropic.AuthenticationError, match="one `Bearer KEY`"):
                await known.messages.create(**ask, extra_headers={**shown, "x-api-key": "another"})
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await known.with_options(api_key="baton.x.y").messages.create(**ask)


async def test_who_keeps_a_connection_over_tls_holds_up_no_drain(installation):
    """Such a client does not read that TLS ends, and says nothing; a gateway that drained stayed for the 30 s of the
    last answer."""
    may_end = asyncio.Event()

    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"pa", "more_body": True})
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"ge"})

    server = open_http("127.0.0.1:0", page, refuse_head, installation.tls("gateway"))
    server.start()
    trusted = ssl.create_default_context(cafile=installation.folder / "ca.crt")

    def ask() -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", server.port), patience(20))
        wrapped = trusted.wrap_socket(plain, server_hostname="localhost")
        wrapped.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        read_upto(wrapped, b"pa")
        return wrapped

    kept = await asyncio.to_thread(ask)
    server.drain()
    assert server.is_busy
    may_end.set()
    await asyncio.to_thread(read_upto, kept, b"ge")
    async with asyncio.timeout(patience(10)):
        while server.is_busy:
            await asyncio.sleep(0.01)
    kept.close()
    await server.stop()


def read_upto(sock: ssl.SSLSocket, end: bytes) -> None:
    text = b""
    while not text.endswith(end):
        text += sock.recv(1024)


async def test_tls_with_the_gateway_s_certificate_and_a_new_one(http_keys, installation, stranger, tmp_path):
    for path in installation.folder.iterdir():
        shutil.copy(path, tmp_path)
    tls = type(installation)(tmp_path).tls("gateway")
    async with http_keys(tls) as (_, client):
        async with client(installation.api_key) as known:
            assert (await known.models.list()).data[0].id == "fake"
        for name in ("gateway.crt", "gateway.key", "ca.crt"):
            shutil.copy(stranger.folder / name, tmp_path)
        async with client(installation.api_key) as known:
            with pytest.raises(openai.APIConnectionError):  # new handshakes show the new certificate
                await known.models.list()


@pytest.mark.parametrize(
    "values, words",
    [
        ({"http": "0.0.0.0:8000"}, "--http 0.0.0.0:8000: beyond loopback this needs"),
        ({"http": "0.0.0.0:8000", "insecure": True}, "--http 0.0.0.0:8000: outside loopback, names of cached"),
        ({"http_origins": ("https://a.example",)}, "--http-origins has no effect without --http"),
    ],
)
def test_what_would_be_open_is_refused(tmp_path, values, words):
    with pytest.raises(ValueError, match=words):
        GatewaySettings(model=tmp_path, **values)
