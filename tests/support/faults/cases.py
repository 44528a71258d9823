"""What several cases promise, ask and record."""

from tests.support.faults.history import percentile

A_HINT = "no request fails, no token changes"
NOBODY_NOTICES = "answered to the end, token for token"


def record_gaps(c, asks) -> None:
    """Record the longest pause of each answer that was begun, as figures of the case."""
    gaps = [ask.gap_s for ask in asks if ask.times]
    c.figures["gap_p50_s"], c.figures["gap_max_s"] = round(percentile(gaps, 50), 3), round(max(gaps, default=0), 3)


async def ask_some(c, prompts, count: int = 6) -> list:
    """Ask prompts that are known and prompts that are not, and wait for the answers."""
    asks = [c.ask(prompts[index % len(prompts)] if index % 2 else 200, 8) for index in range(count)]
    await c.ended(*asks)
    return asks


async def warm_prompts(c, count: int = 2) -> list[list[int]]:
    """Return prompts that have been read once."""
    prompts = [c.world.prompt(260) for _ in range(count)]
    await c.ended(*(c.ask(prompt, 4) for prompt in prompts))
    return prompts
