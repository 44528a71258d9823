"""A task that is supervised ends when it is cancelled, and for nothing else."""

import asyncio
import logging

import pytest

from baton import tasks


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)


class Work:
    """Fails as ordered, each time it begins, then keeps running."""

    def __init__(self, *ends):
        self.ends, self.num_begun, self.goes_on = list(ends), 0, asyncio.Event()

    async def __call__(self) -> None:
        self.num_begun += 1
        if not self.ends:
            self.goes_on.set()
            await asyncio.Event().wait()
        if (end := self.ends.pop(0)) is not None:
            raise end


async def ends_when_cancelled(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await task


@pytest.mark.parametrize(
    "end",
    [ValueError("x"), KeyError("x"), MemoryError(), OverflowError(), asyncio.CancelledError(), TimeoutError(), None],
)
async def test_work_that_fails_begins_again(end, caplog):
    work, failures = Work(end, end, end), []
    task = tasks.start("work", work, on_failure=failures.append)
    async with asyncio.timeout(10):
        await work.goes_on.wait()
    assert work.num_begun == 4 and len(failures) == 3 and task.get_name() == "work"
    lines = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(lines) == 3 and all("work failed" in line.getMessage() for line in lines)
    await ends_when_cancelled(task)


async def test_pauses_double_and_are_bounded(monkeypatch):
    slept, sleep = [], asyncio.sleep

    async def note(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(tasks.asyncio, "sleep", note)
    work = Work(*[ValueError()] * 20)
    task = tasks.start("work", work)
    async with asyncio.timeout(10):
        await work.goes_on.wait()
    assert slept[:4] == [0.001, 0.002, 0.004, 0.008] and slept[-1] == tasks.LONGEST_PAUSE_S
    await ends_when_cancelled(task)


async def test_what_is_fatal_ends_the_work():
    task = tasks.start("work", Work(ValueError("x"), KeyError("fatal")), fatal=(KeyError,))
    with pytest.raises(KeyError, match="fatal"):
        async with asyncio.timeout(10):
            await task


async def test_work_that_swallows_its_cancellation_ends_all_the_same():
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass

    task = tasks.start("work", work)
    await begun.wait()
    await ends_when_cancelled(task)


async def test_work_whose_clean_up_fails_ends_all_the_same():
    work = Work()

    async def fail_behind() -> None:
        try:
            await work()
        finally:
            if work.num_begun == 1:  # so that a second cancel ends it in any case
                raise OSError("the connection cannot be closed")

    task = tasks.start("work", fail_behind)
    await work.goes_on.wait()
    await ends_when_cancelled(task)
    assert work.num_begun == 1


async def test_in_a_group_it_ends_with_the_group():
    work = Work(ValueError("x"))
    async with asyncio.timeout(10):
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                tasks.start("work", work, group=group)
                await work.goes_on.wait()
                raise KeyError
