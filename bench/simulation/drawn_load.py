"""A random load: requests at a rate that changes over time."""

import random

from baton.loadgen.trace import TraceEntry


def drawn_load(
    rate_at, until_s: float, shape: tuple[int, int], seed: int = 0, num_prefixes: int = 40
) -> list[TraceEntry]:
    """Return requests whose rate is a function of the second, and whose prompts share prefixes."""
    rng, at_s, found = random.Random(seed), 0.0, []
    prompt, output = shape
    while True:
        at_s += rng.expovariate(max(1e-6, rate_at(at_s)))
        if at_s >= until_s:
            return found
        num = max(1, round(prompt * rng.uniform(0.5, 1.5)))
        group = rng.randrange(num_prefixes)
        ids = (group, *(1_000_000 + len(found) * 1000 + place for place in range(max(0, num // 512 - 1))))
        found.append(TraceEntry(at_s, num, max(1, round(output * rng.uniform(0.5, 1.5))), ids))
