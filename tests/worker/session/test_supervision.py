"""A worker keeps serving while each of its tasks is killed, three times."""

import asyncio
import contextlib
import itertools

import pytest

from baton import tasks
from tests.support.killing import Killed, kill, our_tasks, waits_for_children
from tests.support.models import make_model
from tests.support.worker.scripted import Pair, Session, make_spec, run_bounded, run_worker

SUPERVISED = {
    "loads", "index events", "ledger watch", "registration", "KV accepting", "lease reaper", "http date",
    "adapters",
}  # fmt: skip
GROUPS = {"reports", "registrations"}  # wait for supervised tasks, and do nothing else
REPLACED = {"session reader", "session writer"}  # their session ends, and its gateway opens another
FATAL = {"end of the gRPC server"}  # when it ends, so does the process
_names = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@contextlib.asynccontextmanager
async def worker_with_all(model):
    """That also tries to register with a gateway, which is not there."""
    async with run_worker(model, "decode", gateways=("127.0.0.1:1",), transports="tcp") as worker:
        yield f"127.0.0.1:{worker.port}"


async def answered(session: Session) -> None:
    """With a load that is reported, and index events."""
    spec = make_spec(range(1, 140), max_tokens=3, temperature=0.0)
    answer = await Pair(session, session).generate_here(f"r{next(_names)}", spec)
    assert len(answer.token_ids[0]) == 3
    await session.next_load()


def table() -> dict[str, list[asyncio.Task]]:
    return our_tasks("Worker.__aenter__")


def test_every_task_is_in_the_table(model):
    async def main():
        async with worker_with_all(model) as target:
            session = await Session(target).open()
            await answered(session)
            told = SUPERVISED | GROUPS | REPLACED | FATAL
            assert table().keys() == told, "a new task: supervise it, and name it here"
            for kind, each in table().items():
                for task in each:
                    is_supervised = task.get_coro().__qualname__ == "supervise"
                    assert is_supervised == (kind in SUPERVISED | GROUPS), kind
                    assert not is_supervised or waits_for_children(task) == (kind in GROUPS), kind
            await session.close()

    run_bounded(main)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("end", [Killed(), None], ids=["fails", "is cancelled"])
@pytest.mark.parametrize("kind", sorted(SUPERVISED | REPLACED))
def test_one_that_is_killed_is_there_again(model, kind, end, monkeypatch):
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)

    async def main():
        async with worker_with_all(model) as target:
            for _ in range(3):
                session = await Session(target).open()
                await answered(session)
                for task in table()[kind]:
                    await kill(task, end)
                if kind in REPLACED:
                    await session.close()
                    session = await Session(target).open()
                await answered(session)
                while kind not in table():
                    await asyncio.sleep(0.01)
                await session.close()

    run_bounded(main)
