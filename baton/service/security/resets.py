"""Delay refusals of calls that their callers have reset. gRPC for Python never frees what it cannot send, 400 bytes a
refusal (grpc/grpc#43360), and reports a reset late: a stranger that opened and reset calls made a server grow by 2 MB a
second."""

from asyncio import CancelledError, sleep
from time import monotonic as now

import grpc

NOTICE_S = 0.05  # within which gRPC tells of a reset, by cancelling the call
WARY_S = 10.0


class Resets:
    """Use `async with resets:` around each refusal. It starts without delay, except for a while after a reset call was
    met: then it waits until gRPC would have reported a reset."""

    def __init__(self) -> None:
        self._wary_until = 0.0

    @property
    def is_wary(self) -> bool:
        return now() < self._wary_until

    async def __aenter__(self) -> None:
        if self.is_wary:
            try:
                await sleep(NOTICE_S)
            except CancelledError:
                self._be_wary()
                raise

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, grpc.aio.InternalError):
            self._be_wary()

    def _be_wary(self) -> None:
        self._wary_until = now() + WARY_S
