"""Which transports a worker may use."""

from types import SimpleNamespace

import pytest

from baton.worker.kv_endpoints import usable_transports
from kvtransfer.transports import transport


@pytest.mark.parametrize("parts", [None, "given back"])
def test_memory_whose_pages_come_and_go_is_not_registered(monkeypatch, parts):
    monkeypatch.setattr(transport, "auto_against", dict)
    engine = SimpleNamespace(ledger=SimpleNamespace(parts=parts), layout=SimpleNamespace(state=None), model_name="tiny")

    def usable(*transports: str) -> list[str]:
        return usable_transports(engine, SimpleNamespace(transports=transports, refused_transports=("grpc",)))

    assert (
        ("nixl" in usable("auto")) == (parts is None)
        and {"shm", "tcp"} < {*usable("auto")}
        and "grpc" not in usable("auto")
    )
    assert usable("shm", "tcp", "grpc") == ["shm", "tcp"]
    if parts is None:
        assert usable("nixl") == ["nixl"]
    else:
        with pytest.raises(ValueError, match="--transports nixl: layers of tiny have windows"):
            usable("tcp", "nixl")


def test_a_state_wants_a_transport_that_moves_it():
    engine = SimpleNamespace(
        ledger=SimpleNamespace(parts=None), layout=SimpleNamespace(state="of a layer"), model_name="tiny",
        pool=SimpleNamespace(device=SimpleNamespace(type="cpu")),
    )  # fmt: skip

    def usable(*transports: str) -> list[str]:
        return usable_transports(engine, SimpleNamespace(transports=transports, refused_transports=()))

    assert usable("nixl", "tcp") == ["nixl", "tcp"]
    with pytest.raises(ValueError, match="--transports nixl: layers of tiny keep a state"):
        usable("nixl")
