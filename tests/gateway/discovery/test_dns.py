"""Workers behind a name: one that joins it is used, one that leaves is forgotten once its session has ended."""

import asyncio
import socket
import subprocess
import sys
import threading

import pytest

from baton.v1 import inference_pb2 as pb
from gateway.discovery import dns as names
from gateway.discovery.session_set import SessionSet
from tests.support.gateway.fake_worker import FakeWorker
from tests.support.pace import patience
from tests.support.process import ROOT


class FakeDNS:
    def __init__(self, monkeypatch):
        self.addresses: dict[str, list[str]] = {}  # by name; none: not found
        monkeypatch.setattr(names, "addresses_of", self._addresses_of)
        monkeypatch.setattr(names, "RESOLVE_S", 0.02)

    async def _addresses_of(self, host: str, port: str) -> list[str]:
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


@pytest.fixture
def dns(monkeypatch) -> FakeDNS:
    return FakeDNS(monkeypatch)


async def answered(c) -> str:
    """By which worker the answer was written."""
    await c.stub.Complete(pb.GenerateRequest(text="hello", stopping=pb.Stopping(max_tokens=3)))
    return next(link.address for link in c.gateway.registry.decode if link.is_serving)


async def looked(c) -> None:
    """The gateway has looked the name up since, and acted on it."""
    (name,), looks = c.gateway.registry._names, []
    keep = name._sessions.keep
    name._sessions.keep = lambda addresses, group: looks.append(keep(addresses, group))
    await c.until(lambda: looks)
    del name._sessions.keep


async def test_a_scaled_service_is_found_and_followed(cluster, digest, dns):
    first, second = [await FakeWorker("decode", digest, 400).start() for _ in range(2)]
    dns.addresses["decode"] = [first.address]
    async with cluster(0, 0, decode_workers=("decode:50062",)) as c:
        c.workers += [first, second]
        registry = c.gateway.registry
        serving = lambda: [link.address for link in registry.decode if link.is_serving]  # noqa: E731
        await c.until(lambda: serving() == [first.address] and registry.not_ready() is None)
        dns.addresses["decode"].append(second.address)
        await c.until(lambda: sorted(serving()) == sorted([first.address, second.address]))

        # Gone from the DNS alone ends nothing; one that is lost too may be back, and one that has left is forgotten.
        dns.addresses["decode"] = [second.address]
        await answered(c)
        assert len(serving()) == 2
        await first.stop()
        await c.until(lambda: serving() == [second.address])
        await looked(c)
        assert len(registry.links) == 2
        await first.start(first.port)
        await c.until(lambda: len(serving()) == 2)
        first.state = "draining"
        await c.until(lambda: serving() == [second.address])
        await first.stop()
        await c.until(lambda: [link.address for link in registry.links] == [second.address])
        assert await answered(c) == second.address


async def test_two_addresses_of_one_worker_are_one_session(cluster, digest, dns):
    """As of a host with two interfaces: by either it may be reached, and by one it is."""
    worker = await FakeWorker("decode", digest, 400).start()
    addresses = [worker.address, f"localhost:{worker.port}"]
    dns.addresses["decode"] = addresses
    async with cluster(0, 0, decode_workers=("decode:50062",), max_start_wait_s=0) as c:
        c.workers.append(worker)
        links = c.gateway.registry.decode
        states = lambda: sorted(link.state.value for link in links)  # noqa: E731
        await c.until(lambda: states() == ["refused", "serving"])
        used, other = sorted(links, key=lambda link: not link.is_serving)
        assert other.reason == f"is the worker at {used.address}, with which there is a session"
        for _ in range(3):
            await answered(c)
        assert used.is_serving and sum(kind == "subscribe" for kind, _ in worker.commands) == 1

        dns.addresses["decode"] = [other.address]  # the interface that was used is gone
        used.address = "127.0.0.1:9"
        used.session.hang_up("its interface is gone")
        await c.until(lambda: other.is_serving and links == [other])
        await answered(c)
        assert list(c.gateway.index._feeds) == [other.worker_id]


async def test_a_name_that_is_not_found_is_said(cluster, dns):
    async with cluster(0, 0, decode_workers=("decode:50062",)) as c:
        await c.until(lambda: "decode:50062: Name or service not known" in (c.gateway.registry.not_ready() or ""))


async def test_a_dns_that_fails_for_a_moment_ends_nothing(cluster, digest, dns):
    worker = await FakeWorker("decode", digest, 400).start()
    dns.addresses["decode"] = [worker.address]
    async with cluster(0, 0, decode_workers=("decode:50062",)) as c:
        c.workers.append(worker)
        registry = c.gateway.registry
        await c.until(lambda: registry.not_ready() is None)
        link = registry.decode[0]
        del dns.addresses["decode"]
        await c.until(lambda: registry._names[0].reason)
        assert registry.decode == [link] and registry.not_ready() is None


@pytest.mark.parametrize(
    "address, is_name", [("decode:1", True), ("localhost:1", True), ("10.0.0.1:1", False), ("[::1]:1", False)]
)
def test_what_is_looked_up(address, is_name):
    assert names.is_name(address) is is_name


async def test_the_machines_own_name_is_one_worker():
    assert await names.addresses_of("localhost", "50062") == ["127.0.0.1:50062"]


class Sessions(SessionSet):
    """Notes that a name was found."""

    def __init__(self):
        self.found = asyncio.Event()

    def keep(self, addresses, group) -> None:
        self.found.set()


async def test_a_name_whose_dns_is_silent_holds_up_itself_alone(monkeypatch):
    """Its look-ups took all threads that there were for them, since none ended when it was given up."""
    answering = threading.Event()
    look_up = socket.getaddrinfo

    def slow(host, *args, **options):
        if host == "slow.example":
            answering.wait()
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(names, "RESOLVE_S", 0.01)
    silent = names.DnsWorkers("slow.example:5", "decode", Sessions())
    sessions = Sessions()
    following = []
    try:
        async with asyncio.TaskGroup() as group:
            looks = []
            following.append(group.create_task(silent.follow(group, lambda: looks.append(silent.reason))))
            async with asyncio.timeout(patience(20)):
                while len(looks) < 40:
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(names, "RESOLVE_S", 3.0)
            other = names.DnsWorkers("localhost:5", "decode", sessions)
            following.append(group.create_task(other.follow(group, lambda: None)))
            async with asyncio.timeout(patience(20)):
                await sessions.found.wait()
            for each in following:
                each.cancel()
        assert set(looks) == {"no answer from the DNS"}
    finally:
        answering.set()


async def test_a_look_up_without_a_thread_is_one_that_failed(monkeypatch):
    """It was a fault of the gateway: INTERNAL to a worker that registered by the name."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(OSError, match="can't start new thread"):
        await names.Resolver(1).resolve("localhost", "5")


def test_a_process_ends_while_a_name_is_looked_up():
    """It waited for the DNS, 127 s for two names that had not been answered for a minute."""
    program = """
import asyncio, socket, time
from gateway.discovery.dns import Resolver
socket.getaddrinfo = lambda *args, **options: time.sleep(3600)

async def main():
    try:
        async with asyncio.timeout(0.1):
            await Resolver(1).resolve("slow.example", "5")
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(30), cwd=ROOT
    )
    assert (ran.stdout, ran.stderr) == ("given up\n", "")
