"""`baton scale`: for how long it waits."""

import asyncio

from baton.cli.cluster import scale
from tests.support.pace import patience


class _Silent:
    """A launcher that does not answer."""

    async def list(self):
        await asyncio.Event().wait()


def test_a_launcher_that_does_not_answer():
    async def main() -> None:
        scaling = asyncio.create_task(scale._scale(_Silent(), {"decode": 2}, 0.1))
        await asyncio.wait({scaling}, timeout=patience(5))
        assert scaling.done() and isinstance(scaling.exception(), TimeoutError)

    asyncio.run(main())
