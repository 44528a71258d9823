"""bench/http_api.py sends the same load over HTTP as over gRPC, and counts what came while all of it was there."""

import asyncio
import contextlib

import pytest

from bench import http_api
from bench.lib.report import Report
from bench.processes import gateway_client, http_client


def test_tokens_a_second_are_those_of_the_time_in_which_all_streams_are_open(monkeypatch):
    """Answers go on when no further one begins: their tokens are of a time that nobody counts."""
    arrivals = [(7, number / 100) for number in range(400)]
    found = {"ttft_s": [0.1], "num_tokens": len(arrivals), "arrivals": arrivals, "steady": (0.5, 2.0)}
    monkeypatch.setattr(http_api, "fleet", lambda **options: contextlib.nullcontext())
    monkeypatch.setattr(http_api, "asks", lambda made: {http_api.HTTP: lambda number, seconds, output: found})
    report = Report("python bench/http_api.py", True)
    http_api.streams(report, True)
    assert report.rows[-1].value == pytest.approx(100)


def test_both_clients_send_the_same_load(monkeypatch):
    """No gateway is needed for that: what each would ask for is noted."""
    over_grpc, over_http = [], []

    async def grpc_one(self, output):
        over_grpc.append(output)
        await asyncio.sleep(0.05)

    async def http_one(reader, writer, body, seen):
        over_http.append(body["max_tokens"])
        await asyncio.sleep(0.05)

    async def both():
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await gateway_client.main("127.0.0.1:9", "closed", "8", "0.2", "200")
        await http_client.main(f"127.0.0.1:{port}", "8", "0.2", "200")
        server.close()

    monkeypatch.setattr(gateway_client.Clients, "one", grpc_one)
    monkeypatch.setattr(http_client, "stream", http_one)
    asyncio.run(both())
    assert over_grpc[:8] == over_http[:8] and len(set(over_http[:8])) > 4
