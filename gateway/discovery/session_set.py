"""Workers that come and go while a gateway runs: a session with each address that is told."""

import asyncio
from collections.abc import Callable, Collection

from baton import tasks
from gateway.link.worker_link import LinkState, WorkerLink


class SessionSet:
    """Of one role, from one place that tells addresses. `links` is the role's list, which links join; `on_left(link)`
    takes one out of where it stands now."""

    def __init__(
        self, links: list[WorkerLink], make_link: Callable[[str], WorkerLink], on_left: Callable[[WorkerLink], None]
    ):
        self._links, self._make_link, self._on_left = links, make_link, on_left
        self._own: dict[WorkerLink, asyncio.Task] = {}

    @property
    def links(self) -> list[WorkerLink]:
        """All that stand in the role now, and those of its own that have left it."""
        return list(dict.fromkeys((*self._links, *self._own)))

    def keep(self, addresses: Collection[str], group: asyncio.TaskGroup) -> None:
        """A session with each of these, in tasks of `group`. One that is told no more goes once its session has ended:
        who tells may forget for a moment, and that ends nothing."""
        told = frozenset(addresses)
        known = {link.address for link in self.links}
        for address in sorted(told - known):
            link = self._make_link(address)
            self._links.append(link)
            self._own[link] = tasks.start(f"link {address}", link.run, group=group)
        for link in [link for link in self._own if link.address not in told]:
            if link.state in (LinkState.CONNECTING, LinkState.REFUSED):
                self._own.pop(link).cancel()
                self._on_left(link)
