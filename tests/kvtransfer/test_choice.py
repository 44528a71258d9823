import pytest

from kvtransfer.errors import TransferFailed
from kvtransfer.layout import Endpoint
from kvtransfer.transport import allowed, choose

ENDPOINTS = [Endpoint(name, "address", "A") for name in ("tcp", "shm", "inproc", "rdma")]


def names(host_id: str, transports, here: bool) -> list[str]:
    return [e.transport for e in choose(ENDPOINTS, host_id, transports, lambda address: here).endpoints]


def test_nearest_first():
    assert names("A", "auto", True) == ["inproc", "shm", "tcp"]
    assert names("A", "auto", False) == ["shm", "tcp"]
    assert names("B", "auto", False) == ["tcp"]
    assert names("A", ("tcp",), True) == ["tcp"]


def test_one_line_says_why():
    reason = choose(ENDPOINTS, "B", "auto", lambda address: False).reason
    assert reason == "tcp (network, 2 copies); inproc: another host; shm: another host"
    assert "\n" not in reason
    assert choose(ENDPOINTS, "A", ("shm", "tcp"), lambda address: False).reason == (
        "shm (same host, 1 copy); inproc: not allowed here; tcp: slower"
    )


def test_none_left():
    with pytest.raises(TransferFailed, match="shm: another host.*tcp: not allowed here"):
        choose(ENDPOINTS, "B", ("shm",), lambda address: False)


def test_unknown_names():
    for bad in ("carrier-pigeon", (), ("tcp", "udp")):
        with pytest.raises(ValueError, match="auto, inproc, shm, tcp"):
            allowed(bad)
