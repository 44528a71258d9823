"""Watch Triton compile: a step that waits for a kernel is slow, and not stuck."""

import logging
import time

logger = logging.getLogger(__name__)


class CompileWatch:
    """Count what Triton compiles in this process, or loads from its cache. Belongs to the thread that launches; any
    other may read.

    `num_kernels`: those that are ready; `since`: when the one that is being compiled was begun, on time.monotonic()."""

    def __init__(self) -> None:
        self.num_kernels = 0
        self.since: float | None = None

    def install(self) -> None:
        """Register as Triton's compile hook, in place of the previous one."""
        from triton import knobs  # an extra

        knobs.runtime.jit_cache_hook = self.begun
        knobs.runtime.jit_post_compile_hook = self.ended

    def begun(self, *_, **__) -> bool:
        """Return False: Triton is to go on and compile."""
        self.since = time.monotonic()
        return False

    def ended(self, *_, fn=None, **__) -> None:
        begun, self.since = self.since, None
        self.num_kernels += 1
        seconds = 0.0 if begun is None else time.monotonic() - begun
        logger.info("kernel %s was compiled in %.1f s", getattr(fn, "name", "?"), seconds)
