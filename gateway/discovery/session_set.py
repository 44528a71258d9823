"""Keep a session with each of a changing set of workers."""

import asyncio
import itertools
from collections.abc import Callable, Collection

from baton import tasks
from gateway.link.worker_link import LinkState, WorkerLink

_MAX_MISSED = 64  # workers at once that are kept though they are not listed and have no session


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
        """`links` is the role's list, which new links join; `all_links()` are those of both roles; `on_left(link)`
        removes one from whichever list it is in; `max_start_wait_s`: how long a lost one is waited for."""
        self._links, self._all_links, self._make_link, self._on_left = links, all_links, make_link, on_left
        self._max_start_wait_s = max_start_wait_s
        self._own: dict[WorkerLink, asyncio.Task] = {}

    @property
    def links(self) -> list[WorkerLink]:
        """Return all links of the role, and those of this set that have moved to the other role."""
        return list(dict.fromkeys((*self._links, *self._own)))

    @property
    def missed(self) -> list[WorkerLink]:
        """Return those of this set that were lost a moment ago: requests wait for them, whether they are listed or
        not."""
        missed = (link for link in self._own if link.is_missed(self._max_start_wait_s))
        return list(itertools.islice(missed, _MAX_MISSED))

    def keep(self, addresses: Collection[str], group: asyncio.TaskGroup) -> None:
        """Open a session with each new address, in tasks of `group`. A worker that is no longer listed is dropped only
        once its session has ended, since a source may forget for a moment, and it is not missed."""
        wanted = frozenset(addresses)
        # An address is one process, which may come back in the other role; a second session with it would be refused.
        known = {link.address for link in self._all_links()}
        for address in sorted(wanted - known):
            link = self._make_link(address)
            self._links.append(link)
            self._own[link] = tasks.start(f"link {address}", link.session.run, group=group)
        wanted |= {link.address for link in self.missed}
        for link in [link for link in self._own if link.address not in wanted]:
            if link.state in (LinkState.CONNECTING, LinkState.REFUSED):
                self._own.pop(link).cancel()
                self._on_left(link)
