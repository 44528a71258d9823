"""Watch Triton compile: a step that waits for a kernel is slow, but not stuck."""

import logging
import time

logger = logging.getLogger(__name__)


class CompileWatch:
    """Count the kernels that Triton compiles in this process or loads from its cache. Used by the thread that launches;
    others may read.

    `num_kernels`: those that are ready; `since`: when compiling of the current one began, on time.monotonic().
    """

    def __init__(self) -> None:
        self.num_kernels = 0
        self.since: float | None = None

    def install(self) -> None:
        """Register as Triton's compile hook, replacing the previous one."""
        from triton import knobs  # an optional dependency

        knobs.runtime.jit_cache_hook = self.begun
        knobs.runtime.jit_post_compile_hook = self.ended

    def begun(self, *_, **__) -> bool:
        """Note that compiling begins; return False, so that Triton goes on."""
        self.since = time.monotonic()
        return False

    def ended(self, *_, fn=None, **__) -> None:
        begun, self.since = self.since, None
        self.num_kernels += 1
        seconds = 0.0 if begun is None else time.monotonic() - begun
        logger.info("kernel %s was compiled in %.1f s", getattr(fn, "name", "?"), seconds)
