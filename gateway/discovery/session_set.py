"""Keep a session with each of a changing set of workers."""

import asyncio
import itertools
from collections.abc import Callable, Collection

from baton import tasks
from gateway.link.worker_link import WorkerLink

_MAX_MISSED = 64  # workers that are kept at a time although they are not listed and have no session


class SessionSet:
    """The sessions of one role whose addresses come from one source: a DNS name, or registrations."""

    def __init__(
        self,
        links: list[WorkerLink],
        all_links: Callable[[], Collection[WorkerLink]],
        make_link: Callable[[str], WorkerLink],
        on_left: Callable[[WorkerLink], None],
        max_start_wait_s: float,
    ):
        """`links` is the role's list, to which new links are added. `all_links()` returns the links of both roles.
        `on_left(link)` removes a link from the list it is in. `max_start_wait_s`: how long a lost worker is kept."""
        self._links, self._all_links, self._make_link, self._on_left = links, all_links, make_link, on_left
        self._max_start_wait_s = max_start_wait_s
        self._own: dict[WorkerLink, asyncio.Task] = {}

    @property
    def links(self) -> list[WorkerLink]:
        """Return all links of the role, and links of this set that have moved to the other role."""
        return list(dict.fromkeys((*self._links, *self._own)))

    @property
    def missed(self) -> list[WorkerLink]:
        """Return the links of this set whose workers were lost a moment ago: requests wait for these workers, whether
        they are listed or not."""
        missed = (link for link in self._own if link.is_missed(self._max_start_wait_s))
        return list(itertools.islice(missed, _MAX_MISSED))

    def keep(self, addresses: Collection[str], group: asyncio.TaskGroup) -> None:
        """Open a session with each new address, in tasks of `group`.

        A worker that is no longer listed is dropped only when its session has ended and it is not missed, since a list
        may lack it for a moment."""
        wanted = frozenset(addresses)
        # The process at an address may come back in the other role; a second session with it would be refused.
        known = {link.address for link in self._all_links()}
        for address in sorted(wanted - known):
            link = self._make_link(address)
            self._links.append(link)
            self._own[link] = tasks.start(f"link {address}", link.session.run, group=group)
        wanted |= {link.address for link in self.missed}
        for link in [link for link in self._own if link.address not in wanted]:
            if not link.state.has_session:
                self._own.pop(link).cancel()
                self._on_left(link)
