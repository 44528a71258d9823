import pytest

from kvtransfer.capabilities import CAPABILITIES, DEVICE, RUNS_TRANSPORTS, SAME_HOST_TRANSPORTS
from kvtransfer.errors import TransferFailed
from kvtransfer.layout import Endpoint
from kvtransfer.transports import transport
from kvtransfer.transports.transport import Busy, TransferRates, allowed, choose

ENDPOINTS = [Endpoint(name, "address", "A") for name in ("grpc", "tcp", "shm", "inproc", "rdma")]


@pytest.fixture(autouse=True)
def without_nixl(monkeypatch):
    monkeypatch.setattr(transport, "find_package", lambda: None)


def names(host_id: str, transports, here: bool) -> list[str]:
    return [e.transport for e in choose(ENDPOINTS, host_id, transports, lambda address: here).endpoints]


def test_nearest_first():
    assert names("A", "auto", True) == ["inproc", "shm", "tcp", "grpc"]
    assert names("A", "auto", False) == ["shm", "tcp", "grpc"]
    assert names("B", "auto", False) == ["tcp", "grpc"]
    assert names("A", ("tcp",), True) == ["tcp"]


def test_one_line_says_why():
    reason = choose(ENDPOINTS, "B", "auto", lambda address: False).reason
    assert reason == (
        "tcp (network, 2 copies); inproc: another host; cuda_ipc: not for a pool in host memory; shm: another host; "
        "nixl: not installed here; grpc: slower"
    )
    assert "\n" not in reason
    assert choose(ENDPOINTS, "A", ("shm", "tcp"), lambda address: False).reason == (
        "shm (same host, 1 copy); inproc: not allowed here; cuda_ipc: not for a pool in host memory; "
        "nixl: not allowed here; grpc: not allowed here; tcp: slower"
    )


def test_each_transport_that_is_left_out_has_its_reason():
    with pytest.raises(TransferFailed, match="shm: another host.*tcp: not allowed here"):
        choose(ENDPOINTS, "B", ("shm",), lambda address: False)


def test_unknown_names():
    for bad in ("carrier-pigeon", (), ("tcp", "udp")):
        with pytest.raises(ValueError, match="auto, inproc, cuda_ipc, shm, nixl, tcp, grpc"):
            allowed(bad)


def test_auto_never_takes_nixl_over_plain_tcp(monkeypatch):
    offered = [*ENDPOINTS, Endpoint("nixl", "address", "A")]
    monkeypatch.setattr(transport, "find_package", lambda: "nixl_cu12")
    monkeypatch.setattr(transport, "has_rdma", lambda: False)
    choice = choose(offered, "B", "auto", lambda address: False)
    assert choice.endpoints[0].transport == "tcp"
    assert "nixl: no RDMA device here, so UCX would run over plain TCP" in choice.reason
    assert choose(offered, "B", ("nixl", "tcp"), lambda address: False).endpoints[0].transport == "nixl"
    monkeypatch.setattr(transport, "has_rdma", lambda: True)
    assert choose(offered, "B", "auto", lambda address: False).endpoints[0].transport == "nixl"


def test_a_pool_in_device_memory_takes_what_moves_it():
    offered = [*ENDPOINTS, Endpoint("cuda_ipc", "address", "A")]
    assert choose(offered, "A", "auto", lambda address: True, (DEVICE,)).endpoints == (offered[-1],)


def test_each_transport_has_the_capabilities_of_the_table():
    """The capabilities of each transport; the suite above holds them to these."""
    table = {can.name: (can.same_host, can.same_process, can.source_sends, can.memory) for can in CAPABILITIES.values()}
    assert table == {
        "inproc": (True, True, False, ("host",)), "cuda_ipc": (True, False, False, ("device",)),
        "shm": (True, False, False, ("host",)), "nixl": (False, False, False, ("host", "device")),
        "tcp": (False, False, True, ("host",)), "grpc": (False, False, True, ("host",)),
    }  # fmt: skip
    assert [can.name for can in CAPABILITIES.values() if can.passes_proxies] == ["grpc"]
    # Gateways pair workers by these sets.
    assert {"inproc", "cuda_ipc", "shm"} == SAME_HOST_TRANSPORTS and {"cuda_ipc", "nixl"} == RUNS_TRANSPORTS


def test_busy_counts_the_wall_clock_once(monkeypatch):
    clock = iter((1.0, 4.0, 10.0, 11.5))
    monkeypatch.setattr(transport.time, "monotonic", lambda: next(clock))
    busy = Busy()
    with busy, busy:
        pass
    with busy:
        pass
    assert busy.seconds == 4.5


def test_rates_follow_what_large_transfers_took():
    rates = TransferRates()
    assert rates.gigabytes_per_s(b"p", "tcp") is None
    rates.note(b"p", "tcp", 1000, 1e-9)  # too little to say anything
    assert rates.gigabytes_per_s(b"p", "tcp") is None
    rates.note(b"p", "tcp", 2 << 30, 1.0)
    before = rates.gigabytes_per_s(b"p", "tcp")
    rates.note(b"p", "tcp", 1 << 30, 1.0)
    assert before == pytest.approx(2.147, rel=1e-3)
    assert 1.073 < rates.gigabytes_per_s(b"p", "tcp") < before and rates.gigabytes_per_s(b"p", "shm") is None
