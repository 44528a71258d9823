"""Linear layers: one kernel for every form a weight can have, and the choice between them."""

from baton.engine.layers.linear.base import LinearKernel
from baton.engine.layers.linear.joined import JoinedLinear
from baton.engine.layers.linear.selection import choose

__all__ = ["JoinedLinear", "LinearKernel", "choose"]
