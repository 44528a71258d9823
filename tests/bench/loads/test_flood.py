"""A flood that does not happen is no measurement: bench/overload.py would pass its goals beside nothing."""

from pathlib import Path

import pytest

from baton.service.security.access import Access
from bench.processes import flood
from tests.support.gateway.fake_gateway import FakeGateway, serving_gateway


@pytest.mark.parametrize("kind", ["streams", "prompts", "unread"])
@pytest.mark.parametrize("refuse_every", [0, 1])
def test_a_flood_that_is_served_or_refused_is_there_when_it_is_measured(kind, refuse_every):
    stub = FakeGateway(refuse_every=refuse_every)
    with serving_gateway(stub) as target, flood.flooding(kind, target, Access(), 4096, 2048):
        assert stub.prompts


def test_a_flood_that_reaches_nobody_is_told(monkeypatch):
    monkeypatch.setattr(flood, "REACHED_S", 3.0)
    with pytest.raises(RuntimeError, match="the flood of streams was neither served nor refused within 3 s"):
        with flood.flooding("streams", "127.0.0.1:9", Access(), 4096, 2048):
            pytest.fail("there is no flood")


@pytest.mark.parametrize("ends", ["at once", "later"])
def test_a_flood_whose_process_ends_is_told(ends, monkeypatch):
    started = []
    monkeypatch.setattr(
        flood, "_check", lambda kind, process, check=flood._check: started.append(process) or check(kind, process)
    )
    with (
        serving_gateway(FakeGateway()) as target,
        pytest.raises(RuntimeError, match="the process of the flood of streams ended"),
    ):
        key = Path("/nowhere/key") if ends == "at once" else None
        with flood.flooding("streams", target, Access(api_key_file=key), 4096, 2048):
            assert ends == "later"
            started[0].kill()
            started[0].join()
