"""A share of a GPU's multiprocessors for one engine: its kernels run on a stream of a CUDA green context, so that a
prefill worker leaves some of them to a decode worker beside it.

Kernels of two processes run at the same time only under CUDA's Multi-Process Service; without it the driver gives them
turns, and a share takes from the one without giving to the other.
"""

import torch

from baton.lines import one_line

MULTIPLE = 8  # multiprocessors that a context may be made of, on Hopper


class Partition:
    """The green context of one engine. Held as long as the engine is: its stream lives in it."""

    def __init__(self, device: torch.device, share: float):
        """`share` of the multiprocessors, above 0 and below 1. ValueError, one line, where there is none."""
        total = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_processors = max(MULTIPLE, round(total * share / MULTIPLE) * MULTIPLE)
        self.num_all = total
        if reason := unavailable():
            raise ValueError(f"sm_share {share:g}: {reason}; leave it out")
        from torch.cuda.green_contexts import GreenContext

        try:
            self._context = GreenContext.create(num_sms=self.num_processors, device_id=device.index)
            self.stream: torch.cuda.Stream = self._context.Stream()
            torch.cuda.synchronize(device)  # what other streams have loaded
        except RuntimeError as error:
            reason = one_line(error, 160)
            raise ValueError(
                f"sm_share {share:g}: the driver has no green contexts here ({reason}); leave it out"
            ) from None

    @property
    def summary(self) -> str:
        return f"{self.num_processors} of {self.num_all} multiprocessors"


def unavailable() -> str:
    """Return why torch cannot make green contexts; "" if it can."""
    try:
        from torch.cuda import green_contexts
    except ImportError:
        return f"torch {torch.__version__} knows no green contexts, 2.13 does"
    if not green_contexts.SUPPORTED or not hasattr(green_contexts.GreenContext, "Stream"):
        return f"torch {torch.__version__} was built without green contexts"
    return ""
