"""What strangers send, over bare sockets: one clear answer, in bounded time and memory, and the connection ends."""

import asyncio
import gc
import inspect
import json
import logging
import re
import socket
import struct

import pytest
from starlette.types import Message

from baton.service.net import http_connection
from baton.service.net.http_connection import ABORT
from baton.service.security.guard import Guard
from baton.v1 import inference_pb2 as pb
from gateway.http import call as call_module
from gateway.http.call import ClientGone, HttpCall
from gateway.http.wire.encoding import event
from gateway.http.wire.errors import to_json
from tests.gateway.http.conftest import decoded
from tests.support.pace import patience

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASK = json.dumps({"prompt": [20, 21, 22], "max_tokens": 2}).encode()
_ID_NAMES, _RETRY_NAMES = {"x-request-id", "request-id"}, {"retry-after", "retry-after-ms"}
_NO_RETRY_NAMES = {"x-should-retry"}


async def said(c, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send the parts, and return all that is answered until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await asyncio.wait_for(reader.read(), patience(20))
    except ConnectionError:
        return b""
    finally:
        writer.close()


def with_length(body: bytes, length: int | None = None) -> bytes:
    return HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


@pytest.mark.parametrize(
    "request_bytes, status, param",
    [
        (with_length(b"{"), 400, "body"),
        (with_length(ASK).replace(b"application/json", b"text/plain"), 415, "content-type"),
        (with_length(ASK).replace(b"localhost", b"evil.example"), 421, "host"),
        (with_length(ASK).replace(b"/v1/completions", b"/v1/nothing"), 404, None),
        (with_length(ASK).replace(b"POST", b"PUT"), 405, "method"),
        (with_length(b'{"prompt": "a", "nonsense": 1}'), 400, "nonsense"),
        (with_length(b'{"prompt": "a", "\\ud800": 1}'), 400, "\ud800"),
        (with_length(b'{"prompt": "a", "model": "other"}'), 404, None),
        (with_length(b'{"prompt": "a", "max_tokens": 2000}'), 400, "max_tokens"),
        (with_length(ASK).replace(b"host:", b"x-request-timeout: 0\r\nhost:"), 504, None),
        (with_length(ASK).replace(b"host:", b"x-request-timeout: soon\r\nhost:"), 400, "x-request-timeout"),
        (HEAD + 70 * b"x-a: 1\r\n" + b"\r\n", 431, "head"),
        (HEAD + b"x-long: " + 9000 * b"a" + b"\r\n\r\n", 431, "head"),
        (HEAD + b"x-long: " + 9000 * b"a", 431, "head"),
        (b"\x16\x03\x01 no words\r\n\r\n", 400, "head"),
    ],
)
async def test_refused_with_its_status_and_field(served, request_bytes, status, param):
    async with served() as (c, _):
        found, headers, value = decoded(await said(c, request_bytes))
        assert (found, value["error"]["param"]) == (status, param)
        assert headers["content-type"] == "application/json" and "\n" not in value["error"]["message"]


async def test_a_length_may_have_any_number_of_zeros_before_it(served):
    """Over 4,300 were a bare 500: Python reads no number of more digits."""
    ask = with_length(ASK).replace(b"content-length: ", b"content-length: " + 4400 * b"0")
    async with served() as (c, _):
        assert decoded(await said(c, ask))[0] == 200


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages"])
async def test_a_bug_is_logged_and_told_in_the_form_of_its_path(served, caplog, monkeypatch, path):
    def fails(body: bytes) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(call_module, "parse", fails)
    async with served() as (c, _):
        status, headers, value = decoded(await said(c, with_length(ASK).replace(b"/v1/completions", path)))
        assert (status, headers["content-type"]) == (500, "application/json")
        assert "KeyError" in value["error"]["message"] and ("type" in value) == (path == b"/v1/messages")
    (told,) = [record for record in caplog.records if record.getMessage().startswith("request failed")]
    assert told.exc_info and told.exc_info[0] is KeyError


async def test_a_wrong_method_is_told_the_right_one(served):
    async with served() as (c, _):
        *_, value = decoded(await said(c, with_length(ASK).replace(b"POST", b"PUT")))
        assert value["error"]["message"] == "method: /v1/completions takes POST, not PUT"


async def test_what_ends_by_a_deadline_that_it_did_not_name_says_so(served):
    usual_s = patience(0.5)
    async with served(default_timeout_s=usual_s) as (c, _):
        for worker in c.decode:
            worker.hold("decode")
        _, _, value = decoded(await said(c, with_length(ASK)))
        assert value["error"]["message"].endswith(f": the request named no deadline, and has {usual_s:g} s here")


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", "error"), ("/v1/messages/batches?a=b", "error"), ("/v1/messages_", None)]
)
async def test_what_is_refused_before_its_endpoint_has_the_form_of_its_path(served, path, kind):
    head = b"POST " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    async with served() as (c, _):
        for ask, statuses, word in (
            (head.replace(b"POST", b"PUT") + b"\r\n", (405, 404), "invalid_request_error"),
            (head + 70 * b"x-a: 1\r\n" + b"\r\n", (431,), "invalid_request_error"),
            (head.replace(b"localhost", b"evil.example") + b"\r\n", (421,), "invalid_request_error"),
            (head + b"no header\r\n\r\n", (400,), "invalid_request_error"),
        ):
            status, _, value = decoded(await said(c, ask))
            assert status in statuses and value.get("type") == kind
            assert value["error"]["type"] == ("not_found_error" if status == 404 else word)
            assert ("param" in value["error"]) == (kind is None)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": []}, "chat"),
        ("/v1/completions", {"prompt": "a", "nonsense": 1, "model": "fake"}, "text_completion"),
        ("/v1/responses", {"input": "a", "background": True}, "chat"),
        ("/v1/messages", {"messages": []}, "chat"),
        ("/v1/embeddings", {"input": []}, "embeddings"),
        ("/v1/rerank", {"query": "a", "model": 7}, "rerank"),
    ],
)
async def test_what_a_body_is_refused_for_is_counted_and_logged(served, caplog, path, body, operation):
    caplog.set_level(logging.INFO, "gateway.observe.access_log")
    ask = with_length(json.dumps(body).encode()).replace(b"/v1/completions", path.encode())
    late = with_length(ASK).replace(b"host:", b"x-request-timeout: soon\r\nhost:")
    async with served() as (c, _):
        assert decoded(await said(c, ask))[0] == decoded(await said(c, late))[0] == 400
        text = c.gateway.meters.exposition().body.decode()
        lines = [line for line in text.splitlines() if line.startswith("baton_requests_total")]
        assert sum(float(line.split()[-1]) for line in lines) == 2 and all("INVALID_REQUEST" in line for line in lines)
        assert c.gateway.handler.num_running == 0
    told = [record.getMessage() for record in caplog.records if "request ended" in record.getMessage()]
    assert len(told) == 2 and all("model=fake outcome=refused reason=INVALID_REQUEST" in line for line in told)
    assert [record.operation for record, *_ in c.gateway.recent.last] == [operation, "text_completion"]


async def test_100_mb_are_refused_at_their_head(served):
    async with served() as (c, _):
        found, headers, value = decoded(await said(c, with_length(bytes(1 << 20), 100_000_000)))
        assert (found, value["error"]["code"], headers["connection"]) == (413, "body_too_large", "close")


async def test_a_body_without_a_length_is_cut_off_where_it_is_too_long(served):
    chunk = b"%x\r\n" % (1 << 16) + bytes(1 << 16) + b"\r\n"
    async with served() as (c, _):
        found, _, value = decoded(await said(c, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 17))
        assert (found, value["error"]["param"]) == (413, "body")


async def test_a_slow_body_is_waited_for_so_long(served, monkeypatch):
    monkeypatch.setattr(call_module, "_LINGER_S", 0.01)
    async with served() as (c, _):
        assert decoded(await said(c, with_length(b"{", 100)))[0] == 408
        assert not c.gateway._guard.slots._num_open


@pytest.mark.parametrize("begun", [b"", b"GE", b"\r\n", HEAD], ids=["nothing", "two letters", "an empty line", "half"])
async def test_a_silent_connection_is_closed(served, monkeypatch, begun):
    monkeypatch.setattr(http_connection, "_HEAD_S", 0.2)
    async with served() as (c, _):
        assert await said(c, begun) == b""
        await c.until(lambda: not c.gateway.http.server_state.connections)


async def test_of_more_connections_than_allowed_a_new_one_takes_the_place_of_the_longest_idle(served):
    async with served() as (c, client):
        c.gateway.http._max_connections = 3
        c.decode[0].hold("decode")
        running, running_writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        running_writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(ASK) + ASK)
        await c.until(lambda: c.gateway.handler.num_running == 1)
        silent = [await asyncio.open_connection("127.0.0.1", c.gateway.http.port) for _ in range(2)]
        await c.until(lambda: len(c.gateway.http.server_state.connections) == 3)
        _, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        assert await silent[0][0].read() == b"" and not silent[1][0].at_eof()
        c.decode[0].release("decode")
        assert b"200 OK" in await running.readuntil(b"\r\n\r\n")
        for each in (running_writer, writer, silent[1][1]):
            each.close()
        await c.until(lambda: not c.gateway.http.server_state.connections)
        assert (await client.models.list()).data


async def test_where_all_connections_are_busy_a_new_one_is_closed(served):
    async with served() as (c, _):
        c.gateway.http._max_connections = 1
        c.decode[0].hold("decode")
        running, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(ASK) + ASK)
        await c.until(lambda: c.gateway.handler.num_running == 1)
        assert await said(c) == b""
        c.decode[0].release("decode")
        assert b"200 OK" in await running.readuntil(b"\r\n\r\n")
        writer.close()


async def test_a_connection_that_was_reset_is_not_kept(served):
    """As its keep-alive timer would: 10,000 of them, over TLS, were 150 MiB for 75 s."""
    async with served() as (c, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(ASK) + ASK)
        await reader.readuntil(b"\r\n\r\n{")
        (connection,) = c.gateway.http.server_state.connections
        await c.until(lambda: connection.timeout_keep_alive_task is not None)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await c.until(lambda: not c.gateway.http.server_state.connections)
        assert connection.timeout_keep_alive_task is None


async def test_one_connection_serves_many_requests_and_pipelined_ones(served):
    ask = HEAD + b"content-length: %d\r\n\r\n" % len(ASK) + ASK
    async with served() as (c, _):
        answer = await said(c, ask + ask, with_length(ASK), pause_s=0.2)
        assert [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", answer)] == [200] * 3


RUN = HEAD + b"content-length: %d\r\n\r\n" % len(ASK) + ASK
PAGE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def test_more_requests_than_may_wait_end_their_connection(served):
    """No key is needed for them: 8 MB of such heads were 513 MB of requests that waited."""
    async with served() as (c, _):
        answer = await said(c, 16 * PAGE + PAGE.replace(b"host:", b"connection: close\r\nhost:"))
        assert answer.count(b"HTTP/1.1 200 OK") == 17
        c.decode[0].hold("decode")
        assert b"HTTP/1.1" not in await said(c, RUN + 16 * PAGE, PAGE, pause_s=0.1)
        await c.until(lambda: not c.gateway.handler.num_running and not c.gateway.http.server_state.connections)
        c.decode[0].release("decode")


@pytest.mark.parametrize("first", [RUN, PAGE + RUN], ids=["at once", "in turn"])
async def test_who_hangs_up_with_a_request_that_waits_ends_the_one_that_runs(served, first):
    """That it had gone was told to the last request alone: the answer was computed to its end."""
    async with served() as (c, _):
        c.decode[0].hold("decode")
        _, writer = await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        writer.write(first)
        await c.until(lambda: c.gateway.handler.num_running == 1)
        writer.write(PAGE)
        (connection,) = c.gateway.http.server_state.connections
        await c.until(lambda: connection.pipeline)
        writer.close()
        await c.until(lambda: not c.gateway.handler.num_running)
        c.decode[0].release("decode")


@pytest.mark.parametrize(
    "behind",
    [b"no words\r\n\r\n", HEAD + 70 * b"x-a: 1\r\n" + b"\r\n", PAGE.replace(b"/health", b"http://a:b/")],
    ids=["no head", "too large", "no URL"],
)
async def test_a_bad_head_behind_a_request_that_runs_is_not_answered_in_its_place(served, behind):
    async with served() as (c, _):
        c.decode[0].hold("decode")
        assert await said(c, RUN, behind, pause_s=0.1) == b""
        await c.until(lambda: not c.gateway.handler.num_running)
        c.decode[0].release("decode")


async def test_a_body_behind_a_request_that_runs_ends_the_connection_where_it_is_long(served):
    """Reading stopped there, and that the client had gone was not noticed: the answer was computed to its end."""
    short, long = ASK + 60_000 * b" ", ASK + 70_000 * b" "
    async with served() as (c, _):
        c.decode[0].hold("decode")
        asking = asyncio.create_task(said(c, RUN, with_length(short), pause_s=0.1))
        await c.until(lambda: c.gateway.handler.num_running == 1)
        assert await said(c, RUN, with_length(long), pause_s=0.1) == b""
        await c.until(lambda: c.gateway.handler.num_running == 1)
        c.decode[0].release("decode")
        assert (await asking).count(b"HTTP/1.1 200 OK") == 2


async def test_a_head_that_begins_behind_a_long_request_is_not_as_long(served):
    """What came with its first bytes was counted as its own: 431."""
    long = ASK + 9000 * b" "
    first, last = HEAD + b"content-length: %d\r\n\r\n" % len(long) + long, with_length(ASK)
    async with served() as (c, _):
        for parts in ((first + last[:20], last[20:]), (first + 12 * RUN + last[:20], last[20:])):
            answer = await said(c, *parts, pause_s=0.2)
            statuses = [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", answer)]
            assert statuses == [200] * (b"".join(parts).count(b"POST"))


async def test_a_body_that_is_no_http_is_told_so(served):
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    async with served() as (c, _):
        found, headers, value = decoded(await said(c, head, b"no length\r\n", pause_s=0.1))
        assert (found, value["error"]["param"], headers["connection"]) == (400, "head", "close")


@pytest.mark.parametrize("trailer", [b"x-request-timeout: 0", b"host: evil.example"])
async def test_what_comes_behind_a_body_is_no_header(served, trailer):
    """A proxy that removes or sets headers does not see it. It held where it came with the head in one piece."""
    ask = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(ASK) + ASK + b"\r\n0\r\n"
    async with served() as (c, _):
        plain, told = [decoded(await said(c, ask + more + b"\r\n"))[::2] for more in (b"", trailer + b"\r\n")]
        assert plain[0] == told[0] == 200
        found, _, value = decoded(await said(c, ask + 70 * b"x-a: 1\r\n" + b"\r\n"))
        assert (found, value["error"]["param"]) == (431, "head")


H2C = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"


@pytest.mark.parametrize("cut", [None, b"Upgr", b"h2", b"\r\n\r\n"], ids=["whole", "in a name", "in a value", "body"])
async def test_an_offer_to_go_on_in_another_protocol_is_passed_over(served, cut):
    """As java.net.http and `curl --http2` make one with their first request: its body had not been read."""
    chunked = HEAD + H2C + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(ASK) + ASK + b"\r\n0\r\n\r\n"
    models = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + H2C + b"\r\n"
    ask = HEAD + H2C + b"content-length: %d\r\n\r\n" % len(ASK) + ASK
    async with served() as (c, _):
        for first, rest in ((ask, b""), (chunked, b""), (models, b""), (models + ask, models)):
            at = first.index(cut) + len(cut) if cut else len(first)
            answer = await said(c, first[:at], first[at:] + rest, with_length(ASK), pause_s=0.1)
            statuses = [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", answer)]
            assert statuses == [200] * (first + rest).count(b" HTTP/1.1") + [200]


async def test_a_head_that_offers_another_protocol_has_the_bounds_of_all(served):
    async with served() as (c, _):
        assert decoded(await said(c, HEAD + H2C + 70 * b"x-a: 1\r\n" + b"\r\n"))[0] == 431
        most = 60 - HEAD.count(b"\r\n")
        ask = with_length(ASK).replace(b"connection: close\r\n", H2C + most * b"x-a: 1\r\n" + b"connection: close\r\n")
        assert b"HTTP/1.1 200 OK" in await said(c, ask)


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [(b"/v1/completions", b"/v1/nothing", 404), (b"POST", b"PUT", 405), (b"localhost", b"evil.example", 421)],
)
async def test_a_body_that_comes_behind_its_answer_is_no_head(served, monkeypatch, before, after, status):
    monkeypatch.setattr(http_connection, "_HEAD_S", patience(5))
    ask = HEAD.replace(before, after) + b"content-length: %d\r\n\r\n" % (1 << 20)
    async with served() as (c, _):
        answer = await said(c, ask, bytes(1 << 20), with_length(ASK), pause_s=0.1)
        assert [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", answer)] == [status, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_http_1_0_ends_with_its_connection(served, stream):
    """That version knows no chunks."""
    body = json.dumps({"prompt": [20, 21], "max_tokens": 2, "stream": stream}).encode()
    async with served() as (c, _):
        head, _, answer = (await said(c, with_length(body).replace(b"HTTP/1.1", b"HTTP/1.0"))).partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"connection: close" in head and b"transfer-encoding" not in head
        if stream:
            assert answer.startswith(b"data: {") and answer.endswith(b"data: [DONE]\n\n")
            assert all(line[:6] in (b"", b"data: ") for line in answer.split(b"\n"))
        else:
            assert f"content-length: {len(answer)}".encode() in head and json.loads(answer)["choices"]
        missing = await said(c, b"GET /nothing HTTP/1.0\r\n\r\n")
        assert decoded(missing)[0] == 404 and b"transfer-encoding" not in missing


LINE_ENDS = "a\u2028b\x85c\u2029d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi", "instructions": LINE_ENDS}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}),
    ],
)
async def test_an_event_is_one_line_to_clients_that_know_more_line_ends(saying, path, body):
    """As httpx's iter_lines does."""
    ask = with_length(json.dumps({**body, "stream": True}).encode()).replace(b"/v1/completions", path.encode())
    async with saying(LINE_ENDS, http="127.0.0.1:0") as c:
        lines = (await said(c, ask)).partition(b"\r\n\r\n")[2].decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    for escaped in (r"\u2028", r"\u0085", r"\u2029"):
        assert escaped in "".join(data) and all(json.loads(each) for each in data)
    assert all(line == "" or re.match("data: |event: |[0-9a-f]+$", line) for line in lines)


async def test_overload_says_when_to_come_back(served):
    async with served(max_concurrent_requests=1) as (c, client):
        c.decode[0].hold("decode")
        first = asyncio.create_task(client.completions.create(model="fake", prompt=[20, 21], max_tokens=2))
        await c.until(lambda: c.gateway.handler.num_running == 1)
        found, headers, value = decoded(await said(c, with_length(ASK)))
        assert (found, value["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) > 0
        c.decode[0].release("decode")
        assert (await first).usage.completion_tokens == 2


async def test_what_fails_after_the_first_token_is_the_last_event(served):
    async with served(drain_grace_s=0.1) as (c, client):
        c.decode[0].hold("decode")
        stream = await client.completions.create(
            model="fake", prompt=[20, 21], max_tokens=4, stream=True, extra_headers={"x-request-timeout": "0.5"}
        )
        with pytest.raises(Exception, match="deadline"):
            async for _ in stream:
                pass
        c.decode[0].release("decode")


async def test_a_drained_gateway_refuses(served):
    async with served() as (c, _):
        c.gateway.handler.is_draining = True
        found, headers, value = decoded(await said(c, with_length(ASK)))
        assert (found, value["error"]["code"], headers["retry-after"]) == (503, "draining", "1")


async def test_a_gateway_that_drains_takes_no_connection_and_answers_those_it_has(served):
    """Behind a balancer half of all new requests were refused for as long as a stream ran on."""
    async with served() as (c, client):
        c.decode[0].hold("decode")
        running = asyncio.create_task(client.completions.create(model="fake", prompt=[20, 21], max_tokens=2))
        await c.until(lambda: c.gateway.handler.num_running == 1)
        c.gateway.handler.is_draining = True
        with socket.create_connection(("127.0.0.1", c.gateway.http.port)) as waiting:  # that nobody has accepted yet
            c.gateway.http.drain()
            waiting.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(waiting, with_length(ASK))
            answer = await asyncio.get_running_loop().sock_recv(waiting, 1 << 16)
        assert decoded(answer)[0] == 503
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", c.gateway.http.port)
        c.decode[0].release("decode")
        assert (await running).usage.completion_tokens == 2


async def test_pages_of_other_origins_are_let_in_by_name_alone(served):
    ask = b"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\norigin: https://app.example\r\n"
    ask += b"access-control-request-method: POST\r\n\r\n"
    async with served() as (c, _):
        assert b"access-control-allow-origin" not in await said(c, ask)
    async with served(http_origins=("https://app.example",)) as (c, _):
        assert b"access-control-allow-origin: https://app.example" in await said(c, ask)
        assert b"access-control-allow-origin" not in await said(c, ask.replace(b"app.example", b"evil.example"))


async def test_pages_see_the_id_of_a_request_and_when_to_come_again(served):
    """Scripts see few headers by themselves: OpenAI's client in a browser waited as long as it guessed."""
    async with served(http_origins=("https://app.example",)) as (c, _):
        ask = with_length(ASK).replace(b"host:", b"origin: https://app.example\r\nhost:")
        answers = [decoded(await said(c, ask))]
        answers.append(decoded(await said(c, ask.replace(b"host:", b"x-request-timeout: 0\r\nhost:"))))
        c.gateway.handler.is_draining = True
        answers.append(decoded(await said(c, ask)))
    for (status, headers, _), names in zip(answers, (_ID_NAMES, _NO_RETRY_NAMES, _RETRY_NAMES), strict=True):
        assert names <= headers.keys(), status
        assert names <= set(headers["access-control-expose-headers"].split(", "))


async def test_a_prompt_is_not_kept_for_the_length_of_its_answer(served):
    """Neither as bytes nor as JSON nor as a message; what is left of it is what was checked."""
    text = "a fox " * 50
    async with served() as (c, client):
        c.decode[0].hold("decode")
        stream = await client.completions.create(model="fake", prompt=text, max_tokens=4, stream=True)
        coroutines = [each for each in gc.get_objects() if inspect.iscoroutine(each) and each.cr_frame]
        kept = [value for each in coroutines for value in each.cr_frame.f_locals.values()]
        calls = [value for value in kept if isinstance(value, HttpCall)]
        assert calls and not any(call.values for call in calls)
        assert not [value for value in kept if isinstance(value, pb.GenerateRequest)]
        assert not [value for value in kept if isinstance(value, bytes | bytearray) and text.encode() in value]
        c.decode[0].release("decode")
        async for _ in stream:
            pass


OPENAPI = PAGE.replace(b"/health", b"/openapi.json")
PREFLIGHT = b"OPTIONS /health HTTP/1.1\r\nhost: localhost\r\norigin: https://app.example\r\n"
PREFLIGHT += b"access-control-request-method: POST\r\n\r\n"


@pytest.mark.parametrize(
    "ask",
    [
        OPENAPI,
        PAGE,
        PAGE.replace(b"GET", b"HEAD"),
        PAGE.replace(b"/health", b"/nothing"),
        PAGE.replace(b"/health", b"/v1/completions"),
        PAGE.replace(b"localhost", b"evil.example"),
        PREFLIGHT,
    ],
    ids=["openapi", "health", "HEAD", "404", "405", "421", "preflight"],
)
async def test_those_who_read_no_pages_leave_their_places_to_others(served, monkeypatch, ask):
    """No key is needed for these: so many connections were all that there were, for ever."""
    monkeypatch.setattr(call_module, "LAST_PART_S", 0.5)
    async with served(http_origins=("https://app.example",)) as (c, _):
        c.gateway.http._max_connections = 2
        sockets = [socket.create_connection(("127.0.0.1", c.gateway.http.port)) for _ in range(2)]
        try:
            await c.until(lambda: len(c.gateway.http.server_state.connections) == 2)
            connections = {each.client: each for each in c.gateway.http.server_state.connections}
            for silent in sockets:
                connection = connections[silent.getsockname()]
                while not connection.flow.write_paused:
                    if not connection.pipeline:
                        silent.sendall(OPENAPI)
                    await asyncio.sleep(0.01)
                silent.sendall(ask)
            await c.until(lambda: not c.gateway.http.server_state.connections)
            assert b"200 OK" in await said(c, PAGE.replace(b"host:", b"connection: close\r\nhost:"))
        finally:
            for silent in sockets:
                silent.close()


def unread(monkeypatch, num_read: int) -> tuple[HttpCall, asyncio.Event]:
    """Return a call whose client reads so many messages, and what is set where it is hung up on."""
    for bound in ("LAST_PART_S", "_LAST_WORDS_S", "_LINGER_S"):
        monkeypatch.setattr(call_module, bound, 0.05)
    sent, has_hung_up = [], asyncio.Event()

    async def send(message) -> None:
        sent.append(message)
        if len(sent) > num_read:
            await asyncio.Event().wait()

    scope = {"headers": [], "method": "POST", "path_params": {}, "client": None, "extensions": {ABORT: has_hung_up.set}}
    return HttpCall(scope, asyncio.Event().wait, send, to_json), has_hung_up


async def test_a_client_that_does_not_read_the_end_is_hung_up_on(monkeypatch):
    """The last part of an answer that is served waits until there is room in its connection."""
    call, has_hung_up = unread(monkeypatch, 2)
    call.open_stream(event, b"")
    await call.begin_stream()
    await call.write(b"data: 1\n\n")
    with pytest.raises(ClientGone):
        await asyncio.wait_for(call.end(b"data: [DONE]\n\n"), patience(20))
    assert has_hung_up.is_set()


async def test_a_client_that_has_not_read_the_answer_before_is_hung_up_on(monkeypatch):
    """As the first part of this one finds no room in their connection: the call had held its tenant's slot for ever."""
    call, has_hung_up = unread(monkeypatch, 0)
    with pytest.raises(ClientGone):
        await asyncio.wait_for(call.reply({}), patience(20))
    assert has_hung_up.is_set()


@pytest.mark.parametrize("num_read", [0, 1, 2])
async def test_a_client_that_does_not_read_why_it_was_refused_is_hung_up_on(monkeypatch, num_read):
    """Its body is not JSON by its head, so that none of it has been read."""
    call, has_hung_up = unread(monkeypatch, num_read)
    guard = Guard(is_open=True)
    await asyncio.wait_for(call.run(guard, "/baton.v1.Inference/Generate", lambda call: asyncio.sleep(0)), patience(20))
    assert has_hung_up.is_set() and not guard.slots._num_open


async def test_a_call_makes_no_task_to_close_how_its_body_was_read(monkeypatch):
    """Python made one for each: its body came out of a generator that was left at its only message."""
    loop, made = asyncio.get_running_loop(), []
    make = loop.create_task
    monkeypatch.setattr(loop, "create_task", lambda work, **options: made.append(repr(work)) or make(work, **options))
    unread: list[Message] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> Message:
        while not unread:
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    call = HttpCall(
        {"headers": headers, "method": "POST", "path_params": {}, "client": None, "extensions": {}},
        receive,
        send,
        to_json,
    )
    await call.run(Guard(is_open=True), "/baton.v1.Inference/Generate", lambda call: call.reply({}))
    await asyncio.sleep(0)
    assert call.values == {} and call.has_begun and not [work for work in made if "async_generator" in work]
