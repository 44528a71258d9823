"""The progress line of a load run: how many requests have ended, and the median latencies of the latest."""

import statistics
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from baton.loadgen.outcome import Latencies
from baton.loadgen.run import OnEnd

_NUM_LATEST = 100  # requests


@contextmanager
def progress(num_requests: int) -> Iterator[OnEnd]:
    """Show a progress line on a terminal. The caller calls what is yielded each time a request ends."""
    ttfts, tpots = deque[float](maxlen=_NUM_LATEST), deque[float](maxlen=_NUM_LATEST)
    with tqdm(total=num_requests, desc="requests", unit="", file=sys.stderr, disable=None) as bar:

        def on_end(latencies: Latencies) -> None:
            if bar.disable:
                return
            for latest, value in ((ttfts, latencies.ttft_s), (tpots, latencies.tpot_s)):
                if value is not None:
                    latest.append(value)
            medians = (f"{name} p50 {_ms(latest)}" for name, latest in (("TTFT", ttfts), ("TPOT", tpots)) if latest)
            bar.set_postfix_str(", ".join(medians), refresh=False)
            bar.update()

        yield on_end


def _ms(values: deque[float]) -> str:
    return f"{1e3 * statistics.median(values):.1f} ms"
