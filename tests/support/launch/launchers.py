"""What every launcher does, whatever it places workers on."""

import asyncio

import pytest

from baton.cli.launch.placing.launcher import LaunchError, PlacedWorker, WorkerLauncher, scale
from tests.support.pace import patience


async def until(launcher: WorkerLauncher, condition, what: str = "") -> list[PlacedWorker]:
    """Watch until `condition(workers)`; return the workers."""
    seen: list[PlacedWorker] = []
    try:
        async with asyncio.timeout(patience(90)):
            async for seen in launcher.watch():
                if condition(seen):
                    return seen
    except TimeoutError:
        raise AssertionError(f"{what}: {seen}") from None
    raise AssertionError(f"{what}: the watch has ended, {seen}")


def all_serve(number: int):
    return lambda workers: [worker.state for worker in workers] == ["serving"] * number


async def check_launcher(launcher: WorkerLauncher) -> None:
    """Start, list, watch, scale and drain, on a launcher that has no workers yet, and has none in the end."""
    assert await launcher.list() == []
    await launcher.start("decode", 2)
    two = await until(launcher, all_serve(2), "two start")
    assert {worker.role for worker in two} == {"decode"} and all(worker.address for worker in two)
    assert len({worker.name for worker in two}) == len({worker.address for worker in two}) == 2
    assert await launcher.list() == two

    await scale(launcher, "prefill", 1)
    three = await until(launcher, all_serve(3), "a prefill worker starts")
    assert {worker.name for worker in two} < {worker.name for worker in three}
    await scale(launcher, "decode", 2)  # as it is
    assert await launcher.list() == three

    await scale(launcher, "decode", 1)
    left = await until(launcher, all_serve(2), "one decode worker goes")
    assert [worker.name for worker in left if worker.role == "decode"] == [two[0].name], "the youngest goes"
    with pytest.raises(LaunchError, match="nobody"):
        await launcher.drain("nobody")

    await scale(launcher, "decode", 2)
    again = await until(launcher, all_serve(3), "one starts again")
    assert two[1].name not in {worker.name for worker in again}, "a name is used once"
    await launcher.drain(two[0].name)  # the one that is named, and not the youngest
    rest = await until(launcher, all_serve(2), "the oldest goes")
    assert {worker.name for worker in rest} == {worker.name for worker in again} - {two[0].name}
    for role in ("prefill", "decode"):
        await scale(launcher, role, 0)
    await until(launcher, lambda workers: not workers, "all go")
