"""Which process runs which file of tests: one those without Ray, and the others meanwhile those with it.

Tests with Ray wait much and others compute much, so that both together take less time than one after the other.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WITH_RAY = ("tests/faults/", "tests/ray/")


class BothSides(LoadFileScheduling):
    """The files in order, but for those without Ray the first process comes first, and for the others the rest do.

    A process that has run a test with Ray runs none without it any more: Ray goes on in it.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        chosen = self._chosen(node)
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not node.shutting_down and self.workqueue and self._chosen(node) is None:
            node.shutdown()  # it ends what it has
        else:
            super()._reschedule(node)

    def _chosen(self, node: WorkerController) -> str | None:
        """The file that a process runs next; None: there is none for it any more."""
        first_with = next((file for file in self.workqueue if file.startswith(WITH_RAY)), None)
        first_without = next((file for file in self.workqueue if not file.startswith(WITH_RAY)), None)
        if self._has_ray(node):
            return first_with
        if node is next(one for one in self.nodes if not self._has_ray(one)):
            return first_without or first_with
        return first_with or first_without

    def _has_ray(self, node: WorkerController) -> bool:
        return any(file.startswith(WITH_RAY) for file in self.assigned_work[node])
