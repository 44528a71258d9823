"""Give one engine a share of a GPU's multiprocessors: its kernels run on a stream of a CUDA green context.

So a prefill worker leaves some multiprocessors to a decode worker on the same GPU.

Kernels of two processes run at the same time only under CUDA's Multi-Process Service. Without it they take turns, and a
share slows one process without helping the other.
"""

import torch

from baton.lines import one_line

MULTIPLE = 8  # a context has a multiple of this many multiprocessors, on Hopper


class Partition:
    """The green context of one engine, with its stream. The engine keeps it as long as it lives."""

    def __init__(self, device: torch.device, share: float):
        """Make a context of a `share` (between 0 and 1) of the multiprocessors. ValueError, one line, if there can be
        none."""
        total = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_processors = max(MULTIPLE, round(total * share / MULTIPLE) * MULTIPLE)
        self.num_all = total
        if reason := unavailable():
            raise ValueError(f"sm_share {share:g}: {reason}; leave it out")
        from torch.cuda.green_contexts import GreenContext

        try:
            self._context = GreenContext.create(num_sms=self.num_processors, device_id=device.index)
            self.stream: torch.cuda.Stream = self._context.Stream()
            torch.cuda.synchronize(device)  # wait for what other streams load
        except RuntimeError as error:
            reason = one_line(error, 160)
            raise ValueError(
                f"sm_share {share:g}: the driver has no green contexts here ({reason}); leave it out"
            ) from None

    @property
    def summary(self) -> str:
        return f"{self.num_processors} of {self.num_all} multiprocessors"


def unavailable() -> str:
    """Return why torch cannot make green contexts, or "" if it can."""
    try:
        from torch.cuda import green_contexts
    except ImportError:
        return f"torch {torch.__version__} knows no green contexts, 2.13 does"
    if not green_contexts.SUPPORTED or not hasattr(green_contexts.GreenContext, "Stream"):
        return f"torch {torch.__version__} was built without green contexts"
    return ""
