"""Decide which registered workers a gateway dials: all that have answered, and a few others at a time.

An address that does not answer is dialled a few times only, since any client that can register, or write into Redis,
can name addresses at which there is no worker.
"""

import random
from collections.abc import Iterator, Mapping, Set

from gateway.discovery.worker_directory import Worker
from gateway.link.worker_link import WorkerLink

MAX_TRIALS = 64  # workers dialled at a time that have not answered, in addition to those that were lost a moment ago
_MAX_FAILED_SESSIONS = 8  # sessions in a row without a Hello; this takes over 2 s even if the address refuses each one
_FIRST_REST_S, _LONGEST_REST_S = 5.0, 60.0


class DialPolicy:
    """Choose which workers, each as (role, address), are dialled. Belongs to the event loop."""

    def __init__(self) -> None:
        self.proven: set[Worker] = set()  # workers that have answered, and have not failed too often since
        self._resting: dict[Worker, tuple[float, float, str]] = {}  # (until when it is not dialled, for how long, why)

    def choose(
        self,
        here: Set[Worker],
        elsewhere: Set[Worker],
        links: Mapping[Worker, WorkerLink],
        missed: Set[Worker],
        at: float,
    ) -> set[Worker]:
        """Return the workers to keep a session with.

        `here` have registered with this gateway, `elsewhere` with others. `links` are the links that exist now,
        `missed` the workers among them that were lost a moment ago. `at`: time.monotonic()."""
        named = here | elsewhere | missed
        stay = missed | {worker for worker in named & links.keys() if links[worker].state.has_session}
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
        """Return why workers of this role are not dialled at present, a line for each."""
        return [f"{address}: {why}" for (its_role, address), (_, _, why) in self._resting.items() if its_role == role]

    def _in_order(
        self, named: Set[Worker], here: Set[Worker], links: Mapping[Worker, WorkerLink], at: float
    ) -> Iterator[Worker]:
        """Yield the workers that may be dialled, proven ones first.

        New workers that registered with other gateways come last and in random order: there may be thousands, and none
        of them should be able to make itself the first."""
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


def _is_failing(link: WorkerLink) -> bool:
    return link.num_failed_sessions >= _MAX_FAILED_SESSIONS
