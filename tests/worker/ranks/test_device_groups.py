"""Workers whose ranks have a pool each, on a CPU: KV crosses between every two numbers of them, rank to rank."""

import asyncio
import random
import socket
from contextlib import asynccontextmanager

import pytest
import torch

from baton.engine import native
from baton.v1 import worker_pb2 as pb
from tests.support import bare_engine
from tests.support.kvtransfer.rig import free_ports
from tests.support.models import make_model
from tests.support.pace import patience
from tests.support.worker.device_ranks import FOLDER, OPTIONS, stand_in_workers
from tests.support.worker.scripted import LegEnded, Session, make_spec, run_bounded, run_pair, run_worker, worker_prompt
from tests.support.worker.sources import generate_with_sources, offered_prefix

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="real devices are another test's"),
    pytest.mark.skipif(native.library() is None, reason=native.unavailable() or "there"),
    pytest.mark.usefixtures("forked_ranks"),
]
SHAPES = {"stages": {"pipeline_parallel": 2}}  # others are numbers of ranks that share layers
SEEDED = {"temperature": 1.0, "seed": 7, "n": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Of two KV heads: of four ranks two have the same one."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "sockets").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "memory"))
    stand_in_workers(monkeypatch.setattr, tmp_path / "memory")
    return tmp_path


@pytest.fixture(scope="module")
def engine(model):
    return bare_engine.load_engine(model, **OPTIONS)


def whole(engine, token_ids, max_tokens, **sampling) -> dict[int, list[int]]:
    request = bare_engine.bare_request("whole", token_ids, max_tokens=max_tokens, **sampling)
    return {index: choice.token_ids for index, choice in bare_engine.serve_alone(engine, [request])["whole"].items()}


@asynccontextmanager
async def groups(gpus, model, prefill: int | str, decode: int | str, **options):
    roles = ({**OPTIONS, **SHAPES.get(shape, {"tensor_parallel": shape})} for shape in (prefill, decode))
    async with run_pair(model, *roles, kv_socket_dir=gpus / "sockets", **options) as found:
        yield found


async def idle(*sessions: Session) -> None:
    for session in sessions:
        await session.wait_idle()


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (2, 1, "cuda_ipc"), (1, 2, "tcp"), (2, 2, "shm"), ("stages", 2, "cuda_ipc"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (1, 4, "cuda_ipc"), (4, 1, "cuda_ipc"), (2, 4, "cuda_ipc"), (4, 2, "shm"), (4, 4, "cuda_ipc"),
                (2, 2, "cuda_ipc"), (2, 2, "grpc"), (4, 4, "tcp"), (1, "stages", "shm"), (4, "stages", "tcp"),
                ("stages", "stages", "cuda_ipc"),
            )
        ),
    ],
)  # fmt: skip
def test_split_equals_whole(model, gpus, engine, prefill, decode, transport):
    """Two prompts, of which the second begins as the first; by the second its worker has some of it."""
    first, second = worker_prompt(150), worker_prompt(150) + worker_prompt(30, 2)

    async def main():
        async with groups(gpus, model, prefill, decode, transports=(transport,)) as (pair, p, d):
            assert str(p.engine.numerics_class) == str(d.engine.numerics_class) == str(engine.numerics_class)
            greedy = await pair.generate("greedy", make_spec(first, max_tokens=5))
            assert greedy.fetched.transport == transport and greedy.fetched.numerics == "exact"
            assert greedy.fetched.num_tokens == 150
            copies = 2 if decode == 4 else 1  # of each of the two heads
            assert greedy.fetched.num_bytes == 150 * pair.prefill.hello.kv_token_bytes * copies
            seeded = await pair.generate("seeded", make_spec(second, max_tokens=4, **SEEDED))
            assert seeded.fetched.num_tokens == 180 - 128
            await idle(pair.prefill, pair.decode)
            return greedy.token_ids, seeded.token_ids

    assert run_bounded(main) == (whole(engine, first, 5), whole(engine, second, 4, **SEEDED))
    assert not list((gpus / "sockets").iterdir()), "ranks have ended by themselves"


def test_each_rank_has_ports_of_its_own(model, gpus):
    """Those that follow the first one's, so that a firewall can be opened."""
    first = free_ports(4)

    async def main():
        options = {**OPTIONS, "tensor_parallel": 2, "kv_socket_dir": gpus / "sockets"}
        async with run_worker(model, "prefill", **options, transports=("shm", "tcp", "grpc"), kv_port=first):
            for port in range(first, first + 4):
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(("127.0.0.1", port))

    run_bounded(main)


def test_what_takers_may_ask_of_a_group(model, gpus, engine):
    """A prefix from the decode worker's ranks, a lease that expires, one that another taker has too, and fetches that
    are cancelled at any time: all blocks come back, and the next answer is right."""
    first, second = worker_prompt(150), worker_prompt(150) + worker_prompt(60, 3)
    chance = random.Random(5)

    async def main():
        async with groups(gpus, model, 2, 2, lease_ttl_s=4.0) as (pair, _, _):
            await pair.generate_here("there", make_spec(first, max_tokens=2))
            spec = make_spec(second, max_tokens=3)
            source = await offered_prefix(pair, spec, 2, pair.decode)
            tokens, _, fetched = await generate_with_sources(pair, spec, [source])
            assert tokens == whole(engine, second, 3)[0][:1] and fetched.num_tokens == 210 - 128

            left = pb.Key(request_id="left")
            await pair.prefill.send(prefill=pb.Prefill(key=left, spec=make_spec(first), taker=pair.taker()))
            assert (await pair.prefill.wait_ended("left")).reason == "LEASE_EXPIRED"
            await idle(pair.prefill)

            await take_twice(pair, make_spec(worker_prompt(140, 4), max_tokens=3))
            for index in range(8):
                name, asked = f"cancelled {index}", make_spec(worker_prompt(120, 10 + index), max_tokens=3)
                generating = asyncio.create_task(pair.generate(name, asked))
                await asyncio.sleep(chance.uniform(0, 0.15))
                await pair.cancel(name)
                await asyncio.gather(generating, return_exceptions=True)
            await idle(pair.prefill, pair.decode)
            last = await pair.generate("last", make_spec(worker_prompt(140, 30), max_tokens=4))
            assert last.token_ids == whole(engine, worker_prompt(140, 30), 4)
            await idle(pair.prefill, pair.decode)

    run_bounded(main)


async def take_twice(pair, spec) -> None:
    """The taker itself comes a second time, under another attempt's key and with a ticket of its own."""
    keys = [pb.Key(request_id="twice", attempt=attempt) for attempt in (0, 1)]
    await pair.prefill.send(prefill=pb.Prefill(key=keys[0], spec=spec, taker=pair.taker()))
    leased = [await pair.prefill.next("twice", "accepted")]
    await pair.prefill.next("twice", "done")
    await pair.prefill.send(
        offer=pb.Offer(key=keys[1], lease_id=leased[0].lease_id, taker=pair.taker(), budget_ms=9000)
    )
    leased.append(await pair.prefill.next("twice", "offered"))
    for key, each in zip(keys, leased, strict=True):
        await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
        await pair.decode.next("twice", "granted")
        await pair.decode.send(fetch=pb.Fetch(key=key, handle=each.handle, ticket=each.ticket))
        await pair.decode.next("twice", "fetched")
    for _ in keys:
        assert (await pair.prefill.next("twice", "ended")).code == 0
    for key in keys:
        await pair.decode.send(cancel=pb.Cancel(key=key))
    await idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "where"), [(2, 1, "transfer.ready"), (1, 2, "transfer.landed")], ids=["giver", "taker"]
)
def test_a_rank_that_is_lost_in_a_transfer(model, gpus, monkeypatch, prefill, decode, where):
    """Its worker says why it ends, the fetch ends there or here, and the other worker has all its blocks back."""
    monkeypatch.setenv("BATON_FAILPOINTS", f"{where}=kill@1")  # of the ranks: this process has begun without
    reasons: list[str] = []
    monkeypatch.setattr("baton.worker.app.exit_for_lost_rank", reasons.append)

    async def main():
        async with groups(gpus, model, prefill, decode, transports=("shm", "tcp"), lease_ttl_s=2.0) as (pair, _, _):
            key, spec = pb.Key(request_id="lost"), make_spec(worker_prompt(150), max_tokens=4)
            await pair.decode.send(admit=pb.Admit(key=key, spec=spec))
            await pair.decode.next("lost", "granted")
            await pair.prefill.send(prefill=pb.Prefill(key=key, spec=spec, taker=pair.taker()))
            accepted = await pair.prefill.next("lost", "accepted")
            await pair.decode.send(fetch=pb.Fetch(key=key, handle=accepted.handle, ticket=accepted.ticket))
            with pytest.raises(LegEnded):
                await pair.decode.next("lost", "fetched")
            await pair.cancel("lost")
            await idle(pair.decode if prefill > 1 else pair.prefill)
            async with asyncio.timeout(patience(10)):
                while not reasons:
                    await asyncio.sleep(0.01)

    run_bounded(main)
    assert [reason.split(") ")[1] for reason in reasons] == ["was killed by signal 9"]
