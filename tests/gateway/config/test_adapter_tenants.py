"""Who may name which adapter: by a file that changes while a gateway runs."""

import pytest

from baton.service.settings import SettingsError
from gateway.config import adapter_tenants
from gateway.config.adapter_tenants import AdapterTenants
from gateway.config.served_model import ServedModel
from gateway.model.model_folder import Defaults


@pytest.fixture
def clock(monkeypatch):
    at = [1000.0]
    monkeypatch.setattr(adapter_tenants, "now", lambda: at[0])
    return at


def test_a_file_that_changes_holds_from_the_next_look_on(tmp_path, clock, caplog):
    path = tmp_path / "tenants.toml"
    path.write_text('own = ["acme"]\n')
    adapters = {"own": b"o", "new": b"n"}
    model = ServedModel("m", 64, 400, frozenset(), Defaults(), adapters=adapters, adapter_tenants=AdapterTenants(path))
    assert [set(model.seen_by(tenant).adapters) for tenant in ("acme", "bravo")] == [{"own", "new"}, {"new"}]
    for text in ('own = ["acme", "bravo"]\nnew = ["bravo"]\n', "own = 5\n", None):
        path.write_text(text) if text else path.unlink()
        clock[0] += 1.0
        assert [set(model.seen_by(tenant).adapters) for tenant in ("acme", "bravo")] == [{"own"}, {"own", "new"}]
    assert len([record for record in caplog.records if "the old ones stay in use" in record.getMessage()]) == 2


@pytest.mark.parametrize("text", ["own = 5\n", 'own = [""]\n', "not toml"])
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path, text):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="--adapter-tenants"):
        AdapterTenants(path)


def test_without_a_file_all_may_name_all():
    assert AdapterTenants().may_name("anyone", "own")
