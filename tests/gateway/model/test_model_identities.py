"""The operator names the served model, or workers from a list: never the worker that registers first.
first."""

import asyncio
import hashlib

import pytest

from gateway.config.settings import GatewaySettings
from gateway.discovery import registration
from gateway.fleet import registry
from gateway.model import model_identities
from gateway.model.model_identities import ModelIdentities
from tests.gateway.calls import generate
from tests.support.gateway.fake_worker import IDENTITY, FakeWorker
from tests.support.gateway.registration import register, serving_addresses

OTHER = hashlib.sha256(b"another model").digest()


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(registration, "_LOOK_S", 0.02)
    monkeypatch.setattr(registry, "LOOK_S", 0.02)
    assert model_identities.LOOK_S == 1.0


@pytest.fixture
def stranger(digest):
    return FakeWorker("decode", digest, 400, model_identity=OTHER)


def reason_of(c, worker) -> str:
    return next((link.reason for link in c.gateway.registry.links if link.address == worker.address), "")


async def test_a_stranger_does_not_decide_where_workers_are_named(cluster, stranger):
    await stranger.start()
    async with cluster(0, 1) as c:
        c.workers.append(stranger)
        named = c.decode[0]
        await register(c, stranger.address)
        await c.until(lambda: OTHER.hex() in reason_of(c, stranger))
        await named.stop()
        await c.until(lambda: not serving_addresses(c))
        num_looks = len(stranger.commands)
        await c.until(lambda: len(stranger.commands) > num_looks)  # once more, without any other
        await c.until(lambda: "which one is served is decided by" in reason_of(c, stranger))
        assert "\n" not in reason_of(c, stranger) and not serving_addresses(c)
        named.held.clear()
        await named.start(named.port)
        await c.until(lambda: serving_addresses(c) == [named.address])
        assert await generate(c, max_tokens=2)


async def test_one_of_the_same_model_that_registers_serves_after_the_named_one_has_gone(cluster, digest):
    twin = await FakeWorker("decode", digest, 400).start()
    async with cluster(0, 1) as c:
        c.workers.append(twin)
        await c.decode[0].stop()
        await c.until(lambda: not serving_addresses(c))
        await register(c, twin.address)
        await c.until(lambda: serving_addresses(c) == [twin.address])


async def test_only_what_is_listed_serves(cluster, digest, stranger):
    good = await FakeWorker("decode", digest, 400).start()
    await stranger.start()
    async with cluster(0, 0, model_identity=(IDENTITY.hex(),)) as c:
        c.workers += [good, stranger]
        await register(c, stranger.address)  # first
        await c.until(lambda: "--model-identity does not list" in reason_of(c, stranger))
        await register(c, good.address)
        await c.until(lambda: serving_addresses(c) == [good.address])
        assert await generate(c, max_tokens=2)


async def test_the_list_changes_while_everything_runs(cluster, digest, stranger, tmp_path, caplog):
    path = tmp_path / "models"
    path.write_text(f"# what we serve\n{IDENTITY.hex()}  # old\n")
    good = await FakeWorker("decode", digest, 400).start()
    await stranger.start()
    async with cluster(0, 0, model_identity=(f"@{path}",)) as c:
        c.workers += [good, stranger]
        for worker in (stranger, good):
            await register(c, worker.address)
        await c.until(lambda: serving_addresses(c) == [good.address])
        path.write_text("nonsense\n")  # changes nothing
        await c.until(lambda: not c.gateway.registry._identities._is_file_good)
        assert serving_addresses(c) == [good.address]
        path.write_text(f"{OTHER.hex()}\n")
        await c.until(lambda: serving_addresses(c) == [stranger.address])
        assert c.fleet.identity == OTHER
        (lost,) = [line for line in caplog.messages if line.startswith("worker lost")]
        assert "its model is not listed any more" in lost  # it was told as one of which there was no word
        await c.until(lambda: "does not list" in reason_of(c, good))


async def test_what_ended_nothing_is_no_reason_of_a_later_end(cluster, caplog):
    """It was told while the worker's Hello was waited for."""
    async with cluster(0, 1) as c:
        (worker,), (link,) = c.decode, c.gateway.registry.decode
        worker.hold("hello")
        link.session.hang_up("a test ends it")
        await c.until(lambda: [kind for kind, _ in worker.commands].count("hello") == 2)
        link.session.hang_up("its model is not listed any more")
        worker.release("hello")
        await c.until(lambda: link.is_serving)
        link.session._silence.reschedule(asyncio.get_running_loop().time())
        await c.until(lambda: caplog.text.count("worker lost") == 2)
        assert "no word from it" in caplog.text


@pytest.mark.parametrize("given, told", [
    (("12ab",), "--model-identity: '12ab' is not a model digest"),
    (("X" * 10_000,), "--model-identity: 'XXXX"),
    (("@/nowhere/models",), "--model-identity: /nowhere/models: No such file"),
])  # fmt: skip
def test_what_is_no_digest_is_one_line(folder, given, told):
    with pytest.raises(ValueError) as caught:
        GatewaySettings(model=folder, model_identity=given)
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_an_empty_file_is_no_list(tmp_path):
    path = tmp_path / "models"
    path.write_text("# nothing yet\n\n")
    with pytest.raises(ValueError, match="lists no model"):
        ModelIdentities((f"@{path}",), False)


def test_without_named_workers_the_first_decides():
    identities = ModelIdentities((), False)
    assert identities.why_not(OTHER, None, False) is None
    assert "the workers that came first have another" in identities.why_not(IDENTITY, OTHER, False)
