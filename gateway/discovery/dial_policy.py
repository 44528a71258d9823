"""Decide which named workers a gateway dials: those that have answered, and a few others at a time, each a few times.

Any client that can register, or write into Redis, can name addresses where no worker is.
"""

import random
from collections.abc import Iterator, Mapping, Set

from gateway.discovery.worker_directory import Worker
from gateway.link.worker_link import LinkState, WorkerLink

MAX_TRIALS = 64  # workers at once that are dialled and do not answer, beside those that were lost a moment ago
_MAX_FAILED_SESSIONS = 8  # sessions in a row without a Hello, over 2 s where it is refused at once
_FIRST_REST_S, _LONGEST_REST_S = 5.0, 60.0


class DialPolicy:
    """Belongs to the event loop. A worker is (role, address)."""

    def __init__(self) -> None:
        self.proven: set[Worker] = set()  # those that have answered, and were not given up since
        self._resting: dict[Worker, tuple[float, float, str]] = {}  # until when, how long, and why

    def choose(
        self,
        here: Set[Worker],
        elsewhere: Set[Worker],
        links: Mapping[Worker, WorkerLink],
        missed: Set[Worker],
        at: float,
    ) -> set[Worker]:
        """Return the workers to keep a session with. `here` have registered with this gateway, `elsewhere` with others;
        `links` are those that exist now, `missed` those of them that were lost a moment ago; `at`: time.monotonic()."""
        named = here | elsewhere | missed
        stay = missed | {worker for worker in named & links.keys() if _in_session(links[worker])}
        self.proven = {worker for worker in self.proven & named & links.keys() if not _is_failing(links[worker])} | stay
        self._resting = {worker: rest for worker, rest in self._resting.items() if worker in named}
        chosen, room = set(), MAX_TRIALS
        for worker in self._in_order(named, here, links, at):
            link = links.get(worker)
            if worker in stay:
                chosen.add(worker)
                self._resting.pop(worker, None)
            elif link is not None and _is_failing(link):
                self._rest(worker, link.reason, at)
            elif room:
                chosen.add(worker)
                room -= 1
        return chosen

    def excuses(self, role: str) -> list[str]:
        """Return why some workers of this role are not dialled at present, one line each."""
        return [f"{address}: {why}" for (its_role, address), (_, _, why) in self._resting.items() if its_role == role]

    def _in_order(
        self, named: Set[Worker], here: Set[Worker], links: Mapping[Worker, WorkerLink], at: float
    ) -> Iterator[Worker]:
        """Yield those that may be dialled, proven ones first. Strangers of other gateways are drawn at random: there
        may be thousands, and none should be able to come first."""
        new = named - links.keys() - {worker for worker, (until, _, _) in self._resting.items() if at < until}
        tried = links.keys() & named - self.proven
        for group in (self.proven, tried & here, new & here, tried - here):
            yield from group
        strangers = tuple(new - here)
        yield from random.sample(strangers, min(len(strangers), MAX_TRIALS))

    def _rest(self, worker: Worker, why: str, at: float) -> None:
        _, last_s, _ = self._resting.get(worker, (0.0, _FIRST_REST_S / 2, ""))
        rest_s = min(2 * last_s, _LONGEST_REST_S)
        self._resting[worker] = at + rest_s, rest_s, why


def _in_session(link: WorkerLink) -> bool:
    return link.state not in (LinkState.CONNECTING, LinkState.REFUSED)


def _is_failing(link: WorkerLink) -> bool:
    return link.num_failed_sessions >= _MAX_FAILED_SESSIONS
