"""Pace the refusals of one tenant. A client that retries without delay would flood a server with refusals: each takes
about as long as a token for every stream, and delays the tokens of others."""

from asyncio import sleep
from time import monotonic as now

PER_S, BURST = 50, 50  # per tenant: refusals a second, and how many without delay
LONGEST_S = 2.0
MAX_HELD = 1024  # waiting calls; beyond them, refusals are not delayed


class Refusals:
    """Pace the refusals of one server. Belongs to its event loop."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}  # tenant -> when its next refusal would be due without a burst
        self.num_held = 0

    async def hold(self, tenant: str) -> None:
        """Wait until the next refusal of this tenant may be sent, LONGEST_S at most."""
        at = now()
        if len(self._due) > MAX_HELD:
            self._due = {each: due for each, due in self._due.items() if due > at}
        due = min(max(self._due.get(tenant, at), at) + 1 / PER_S, at + LONGEST_S + BURST / PER_S)
        self._due[tenant] = due
        wait_s = due - at - BURST / PER_S
        if wait_s <= 0 or self.num_held >= MAX_HELD:
            return
        self.num_held += 1
        try:
            await sleep(wait_s)
        finally:
            self.num_held -= 1
