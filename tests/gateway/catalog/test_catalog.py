"""Several models behind one gateway: which one a request gets, and how models come, are replaced and go meanwhile."""

import asyncio
import contextlib
import hashlib
import json
import shutil

import grpc
import pytest

from baton.v1 import fleet_pb2, fleet_pb2_grpc
from baton.v1 import inference_pb2 as pb
from gateway.catalog import version_factory
from gateway.config.settings import GatewaySettings
from gateway.discovery import registration
from gateway.text.text_work import TextWork
from tests.gateway.calls import PROMPT, generate, ids_of
from tests.support.client import make_request
from tests.support.gateway.fake_worker import FakeWorker, tokens_of
from tests.support.gateway.registration import register
from tests.support.pace import patience

IDENTITIES = {name: hashlib.sha256(name.encode()).digest() for name in ("a", "b", "c", "a2")}
ADAPTER = hashlib.sha256(b"adapter").digest()


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(registration, "_LOOK_S", 0.02)


@pytest.fixture(scope="module")
def root(folder, tmp_path_factory):
    """Folders a and b with one tokenizer, c with another, a2 with a shorter context."""
    root = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c", "a2"):
        shutil.copytree(folder, root / name)
    tokenizer = json.loads((root / "c" / "tokenizer.json").read_text())
    (root / "c" / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    config = json.loads((root / "a2" / "config.json").read_text()) | {"max_position_embeddings": 512}
    (root / "a2" / "config.json").write_text(json.dumps(config))
    (root / "broken").mkdir()
    (root / "outside").symlink_to(folder)
    (root / "circle").symlink_to(root / "circle")
    return root


def worker_of(root, path: str, role: str = "decode", name: str = "", **hello) -> FakeWorker:
    digest = hashlib.sha256((root / path / "tokenizer.json").read_bytes()).digest()
    worker = FakeWorker(role, digest, 400, model_identity=IDENTITIES[path], **hello)
    worker.hello.model.name = name or path
    return worker


@pytest.fixture
def serving(cluster, root):
    """`async with serving("a", "b") as c`: a gateway of these models, with a decode worker each in `c.of`."""

    @contextlib.asynccontextmanager
    async def start(*names, **settings):
        given = {"model": ",".join(f"{name}={root / name}" for name in names), "model_root": root}
        async with cluster(0, 0, **{"max_start_wait_s": 0.0, **given, **settings}) as c:
            c.of = {}
            for name in names:
                await join(c, name, worker_of(root, name))
            yield c

    return start


async def join(c, name: str, worker: FakeWorker) -> None:
    c.of[name] = await worker.start()
    c.workers.append(worker)
    await register(c, worker.address, worker.role)
    await c.until(lambda: any(link.is_serving and link.address == worker.address for link in c.gateway.registry.links))


def operator(c) -> fleet_pb2_grpc.FleetStub:
    return fleet_pb2_grpc.FleetStub(c.channel)


async def add(c, name: str, path: str, identity: bytes = b"") -> None:
    await operator(c).AddModel(
        fleet_pb2.AddModelRequest(name=name, path=path, identity=identity.hex()), timeout=patience(20)
    )


async def states(c) -> list[tuple[str, str]]:
    models = (await operator(c).ListWorkers(fleet_pb2.ListWorkersRequest(), timeout=patience(20))).models
    return [(model.name, model.state) for model in models]


async def refusal(work) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await work
    return raised.value.code().name, str(raised.value.details())


async def test_each_request_goes_to_the_model_that_it_names(serving):
    async with serving("a", "b", "c") as c:
        for name in ("b", "c", "a"):
            assert ids_of(await generate(c, model=name, max_tokens=4)) == tokens_of(PROMPT, 4, 400)
            assert [each for each, worker in c.of.items() if "admit" in worker.kinds()] == [name]
            c.of[name].commands.clear()
        asked = {name: worker_spans(c, name) for name in c.of}
        assert not asked["a"] & asked["b"] and not asked["b"] & asked["c"]
        await c.idle()


def worker_spans(c, name: str) -> set[bytes]:
    version = next(each for each in c.gateway.catalog.versions if each.name == name)
    return set(version.pipeline.prefix_hashes.spans("default", PROMPT).hashes)


async def test_names_that_are_not_served(serving):
    async with serving("a", "b") as c:
        code, told = await refusal(c.stub.Complete(make_request(PROMPT, model="z")))
        assert (code, told) == ("NOT_FOUND", "model 'z' is not served here, only a; b")
        code, told = await refusal(c.stub.Complete(make_request(PROMPT)))
        assert (code, told) == ("INVALID_ARGUMENT", "model: is needed, one of: a, b")
        code, _ = await refusal(c.stub.GetModelInfo(pb.GetModelInfoRequest(model="z")))
        assert code == "NOT_FOUND"
        text = c.gateway.meters.exposition().body.decode()
        assert 'model_name="z"' not in text and 'reason="MODEL_NOT_FOUND"' in text


async def test_adapters_are_found_by_their_model_and_by_their_own_name(serving, root):
    async with serving("a", "b") as c:
        for name, adapters in (("a", ("only", "both")), ("b", ("both",))):
            named = [{"name": each, "identity": ADAPTER} for each in adapters]
            await join(c, name, worker_of(root, name, adapters=named))
        assert await generate(c, model="only", max_tokens=2)
        assert await generate(c, model="b:both", max_tokens=2)
        assert "admit" in c.of["a"].kinds() and "admit" in c.of["b"].kinds()
        code, told = await refusal(c.stub.Complete(make_request(PROMPT, model="both")))
        assert code == "INVALID_ARGUMENT" and told.endswith("say one of: a:both, b:both")
        listed = (await c.stub.ListModels(pb.ListModelsRequest())).models
        assert [(each.name, list(each.adapters)) for each in listed] == [("a", ["both", "only"]), ("b", ["both"])]
        code, told = await refusal(add(c, "only", "c"))
        assert code == "INVALID_ARGUMENT" and "only is an adapter's" in told


async def test_workers_of_one_tokenizer_are_told_apart_by_name(serving, root):
    async with serving("a", "b") as c:
        odd = await worker_of(root, "a", name="elsewhere").start()
        c.workers.append(odd)
        await register(c, odd.address)
        await c.until(lambda: "must be one of a, b" in reason_of(c, odd))
        other = await worker_of(root, "a2", name="a").start()
        c.workers.append(other)
        await register(c, other.address)
        await c.until(lambda: "the workers that came first have another" in reason_of(c, other))


def reason_of(c, worker) -> str:
    return next((link.reason for link in c.gateway.registry.links if link.address == worker.address), "")


async def test_a_model_whose_workers_are_gone(serving):
    async with serving("a", "b") as c:
        await c.of["b"].stop()
        await c.until(lambda: c.gateway.registry.not_ready_of(c.gateway.registry.fleets[1]))
        code, told = await refusal(c.stub.Complete(make_request(PROMPT, model="b"), timeout=patience(20)))
        assert code == "UNAVAILABLE" and "no worker serves b" in told
        assert await generate(c, model="a", max_tokens=2)
        assert c.gateway.registry.not_ready() is None
        assert await states(c) == [("a", "serving"), ("b", "waiting")]
        assert [each.name for each in (await c.stub.ListModels(pb.ListModelsRequest())).models] == ["a", "b"]
        c.of["b"].held.clear()


async def test_a_full_queue_of_one_model_is_no_others(serving):
    async with serving("a", "b", max_queued_requests=1) as c:
        c.of["a"].refusals = ["kv_full"] * 1000
        waiting = asyncio.create_task(generate(c, model="a", max_tokens=2))
        await c.until(lambda: len(c.gateway.catalog.versions[0].pipeline.queues))
        assert await generate(c, model="b", max_tokens=2)
        text = c.gateway.meters.exposition().body.decode()
        assert (
            'baton_requests_waiting{model_name="a"} 1.0' in text
            and 'baton_requests_waiting{model_name="b"} 0.0' in text
        )
        c.of["a"].refusals = []
        assert await waiting


async def test_calls_of_two_models_that_no_worker_sees_are_counted_apart(serving, monkeypatch):
    encode, may_end, held = TextWork.encode, asyncio.Event(), []

    async def hold(self, *args):
        held.append(self)
        await may_end.wait()
        return await encode(self, *args)

    monkeypatch.setattr(TextWork, "encode", hold)
    async with serving("a", "b") as c:
        asked = [pb.TokenizeRequest(text="the quick fox", model=name) for name in ("a", "b")]
        asking = asyncio.gather(*(c.stub.Tokenize(each, timeout=patience(20)) for each in asked))
        await c.until(lambda: len(held) == 2)
        may_end.set()
        first, second = await asking
        assert first.token_ids == second.token_ids and first.token_ids
        admission = c.pipeline.admission
        assert not admission.key_ids and not admission._num


async def test_one_is_added_and_removed(serving, root):
    async with serving("a") as c:
        await add(c, "c", "c")
        assert await states(c) == [("a", "serving"), ("c", "waiting")]
        assert (await refusal(c.stub.Complete(make_request(PROMPT, model="c"), timeout=patience(20))))[
            0
        ] == "UNAVAILABLE"
        await join(c, "c", worker_of(root, "c", name="whatever"))
        c.of["c"].hold("decode")
        running = asyncio.create_task(generate(c, model="c", max_tokens=4))
        await c.until(lambda: "admit" in c.of["c"].kinds())
        answer = await operator(c).RemoveModel(fleet_pb2.RemoveModelRequest(name="c"))
        assert answer.num_running == 1
        assert (await refusal(c.stub.Complete(make_request(PROMPT, model="c"))))[0] == "NOT_FOUND"
        assert await states(c) == [("a", "serving"), ("c", "retired")]
        c.of["c"].release("decode")
        assert ids_of(await running) == tokens_of(PROMPT, 4, 400)
        await c.until(
            lambda: "no longer c here" in reason_of(c, c.of["c"]) or "another tokenizer" in reason_of(c, c.of["c"])
        )
        assert await states(c) == [("a", "serving")]
        code, told = await refusal(operator(c).RemoveModel(fleet_pb2.RemoveModelRequest(name="a")))
        assert code == "FAILED_PRECONDITION" and "only model" in told


async def test_one_is_replaced_while_it_answers(serving, root):
    """New requests go to the new one once it has a worker; the old one ends what it began, and is then refused."""
    async with serving("a", "b") as c:
        old = c.of["a"]
        old.hold("decode")
        running = asyncio.create_task(generate(c, model="a", max_tokens=4))
        await c.until(lambda: "admit" in old.kinds())
        await add(c, "a", "a2", IDENTITIES["a2"])
        assert await states(c) == [("a", "serving"), ("b", "serving"), ("a", "waiting")]
        old.release("decode")
        assert ids_of(await generate(c, model="a", max_tokens=3)) == tokens_of(PROMPT, 3, 400)
        old.hold("decode")
        second = asyncio.create_task(generate(c, model="a", max_tokens=4))
        await c.until(lambda: old.kinds().count("admit") == 3)
        await join(c, "a", worker_of(root, "a2", name="a", context=512))
        new = c.of["a"]
        assert await states(c) == [("a", "retired"), ("b", "serving"), ("a", "serving")]
        assert await generate(c, model="a", max_tokens=2)
        assert new.kinds().count("admit") == 1 and old.kinds().count("admit") == 3
        assert (await c.stub.GetModelInfo(pb.GetModelInfoRequest(model="a"))).context == 512
        old.release("decode")
        assert ids_of(await running) == ids_of(await second) == tokens_of(PROMPT, 4, 400)
        await c.until(lambda: "no longer a here" in reason_of(c, old))
        assert await states(c) == [("b", "serving"), ("a", "serving")]
        await add(c, "a", "a", IDENTITIES["a"])  # back again
        await c.until(lambda: len(c.gateway.catalog.versions) == 2 and not reason_of(c, old))
        assert await generate(c, model="a", max_tokens=2) and "admit" in old.kinds()[-4:]
        await c.idle()


async def test_a_stranger_replaces_nothing(serving, root):
    """Only what an operator has added may take over a name."""
    async with serving("a", model_identity=(IDENTITIES["a"].hex(),)) as c:
        await add(c, "a", "a2")
        other = await worker_of(root, "a2", name="a").start()
        c.workers.append(other)
        await register(c, other.address)
        await c.until(lambda: "--model-identity does not list" in reason_of(c, other))
        assert await generate(c, model="a", max_tokens=2) and "admit" in c.of["a"].kinds()


@contextlib.asynccontextmanager
async def cancelled_adding(c, patch, *asked):
    """AddModel that hangs within, and is cancelled at the end."""
    began = asyncio.Event()

    async def hang(path, encode):
        began.set()
        await asyncio.Event().wait()

    with patch.context() as inside:
        inside.setattr(version_factory, "read_public_prefixes", hang)
        adding = asyncio.create_task(add(c, *asked))
        await began.wait()
        yield
        adding.cancel()
        await c.until(lambda: len(c.gateway.registry.fleets) == 1)


@pytest.fixture
def public_prefixes(tmp_path):
    path = tmp_path / "public.toml"
    path.touch()
    return path


async def test_one_whose_call_is_cancelled_is_not_added(serving, root, monkeypatch, public_prefixes):
    """It would take the workers of the one that is added next."""
    async with serving("a", public_prefixes=public_prefixes) as c:
        async with cancelled_adding(c, monkeypatch, "b", "b", IDENTITIES["b"]):
            pass
        await add(c, "b", "b", IDENTITIES["b"])
        await join(c, "b", worker_of(root, "b"))
        assert await generate(c, model="b", max_tokens=2)


async def test_a_worker_that_came_to_one_that_was_not_added_may_come_again(serving, root, monkeypatch, public_prefixes):
    async with serving("a", public_prefixes=public_prefixes) as c:
        async with cancelled_adding(c, monkeypatch, "b", "b"):
            await join(c, "b", worker_of(root, "b"))
        await add(c, "b", "b")
        await c.until(lambda: ("b", "serving") in states_here(c))
        assert await generate(c, model="b", max_tokens=2)


def states_here(c) -> list[tuple[str, str]]:
    registry = c.gateway.registry
    return [(fleet.name, "waiting" if registry.not_ready_of(fleet) else "serving") for fleet in registry.fleets]


@pytest.mark.parametrize("is_running", [False, True])
async def test_one_that_was_removed_is_added_again_with_its_workers(serving, is_running):
    """Also where a request still runs on what was removed."""
    async with serving("a", "b") as c:
        worker = c.of["b"]
        worker.hold("decode")
        running = asyncio.create_task(generate(c, model="b", max_tokens=4))
        await c.until(lambda: worker.held)
        if not is_running:
            worker.release("decode")
            await running
        await operator(c).RemoveModel(fleet_pb2.RemoveModelRequest(name="b"))
        if not is_running:
            await c.until(lambda: "no longer b here" in reason_of(c, worker))
        await add(c, "b", "b")
        worker.release("decode")
        assert ids_of(await running) == tokens_of(PROMPT, 4, 400)
        await c.until(lambda: states_here(c) == [("a", "serving"), ("b", "serving")])
        assert await generate(c, model="b", max_tokens=2)
        await c.idle()


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (dict(name="", path="b"), "INVALID_ARGUMENT", "name"),
        (dict(name="b", path=""), "INVALID_ARGUMENT", "path: is not below --model-root"),
        (dict(name="b", path="../x"), "INVALID_ARGUMENT", "path: is not below --model-root"),
        (dict(name="b", path="b\0"), "INVALID_ARGUMENT", "path: names no folder"),
        (dict(name="b", path="circle"), "INVALID_ARGUMENT", "path: names no folder"),
        (dict(name="b", path="nowhere"), "INVALID_ARGUMENT", "path: names no folder"),
        (dict(name="b", path="outside"), "INVALID_ARGUMENT", "path: is not below --model-root"),
        (dict(name="b", path="broken"), "INVALID_ARGUMENT", "config.json: No such file"),
        (dict(name="b", path="b", identity="12"), "INVALID_ARGUMENT", "identity: is not 64 hex digits"),
        (dict(name="b", path="b", identity=IDENTITIES["a"].hex()), "INVALID_ARGUMENT", "is served already, as a"),
    ],
)
async def test_what_is_not_added(serving, asked, code, words):
    async with serving("a") as c:
        found, told = await refusal(operator(c).AddModel(fleet_pb2.AddModelRequest(**asked)))
        assert found == code and words in told and "\n" not in told
        assert await states(c) == [("a", "serving")]


async def test_without_a_root_none_is_added(serving):
    async with serving("a", model_root=None) as c:
        assert (await refusal(add(c, "b", "b")))[0] == "FAILED_PRECONDITION"
        assert (await refusal(operator(c).RemoveModel(fleet_pb2.RemoveModelRequest(name="z"))))[0] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(model="a=x,y"), "--model 'y': give NAME=DIR"),
        (dict(model="a=x,a=y"), "--model a: is given twice"),
        (dict(model="=x,a=y"), "the name"),
        (dict(model="a=x,b=y", served_model_name="c"), "--served-model-name has no effect"),
    ],
)
def test_settings_that_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        GatewaySettings(**fields)
