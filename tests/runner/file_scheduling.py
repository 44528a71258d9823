"""`--dist loadfile` that outlives the death of a process: pytest-xdist (3.8) starts the test that a process died of
again and again, until it gives up with the rest of the file, and hands out files that are done: whoever gets one waits
for ever."""

from collections import OrderedDict

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

ONE_PROCESS = ("tests/faults",)  # folders whose tests share a stack of seven processes, which each would start anew


class LastingFileScheduling(LoadFileScheduling):
    """The test that a process died of has failed, and the rest of its files goes to other processes. Files of
    ONE_PROCESS stay together."""

    def _split_scope(self, nodeid: str) -> str:
        scope = super()._split_scope(nodeid)
        return next((folder for folder in ONE_PROCESS if scope.startswith(f"{folder}/")), scope)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that it died of, if any."""
        if self.collection is None:
            self.registered_collections.pop(node, None)  # the process in its place is waited for
        units = self.assigned_work.pop(node)
        crashed = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        if crashed is not None:
            units[self._split_scope(crashed)][crashed] = True
        left = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        self.workqueue = OrderedDict({**left, **self.workqueue})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it is asked again once it has collected
            return
        super()._reschedule(node)
        # A process runs a test once it knows the one that follows, or that none does.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
