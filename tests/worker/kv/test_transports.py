"""Which transports a worker may use."""

from types import SimpleNamespace

import pytest

from baton.worker.kv_transfer import usable_transports
from kvtransfer.transports import transport


@pytest.mark.parametrize("parts", [None, "given back"])
def test_memory_whose_pages_come_and_go_is_not_registered(monkeypatch, parts):
    monkeypatch.setattr(transport, "auto_against", dict)
    engine = SimpleNamespace(ledger=SimpleNamespace(parts=parts), model_name="tiny")

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
