"""SwiGLU, with care for where torch cuts an elementwise loop.

`F.silu` is a trap for batch invariance: its vector code and the scalar code for what is left over at the end of a loop
differ in the last bit (fp32: 4 % of elements), and loops end where a thread's share ends. So rows are a multiple of
the vector loop's stride long, and no call is cut within a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR_STRIDE = 64  # elements per turn of the widest vector loop (bf16, AVX-512); rows are padded to a multiple of it
GRAIN = 32768  # elements up to which torch runs an elementwise loop on one thread


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2 * size], gates first -> silu(gate) * up [T, size]. `size` is a multiple of VECTOR_STRIDE."""
    gate, up = gate_up.chunk(2, dim=1)
    if gate_up.device.type != "cpu":  # one thread an element: nothing is cut
        return F.silu(gate).mul_(up)
    num_rows, size = gate.shape
    num_threads = torch.get_num_threads()
    whole = gate.numel() < GRAIN or num_threads == 1
    # Equal shares of whole rows: torch uses all threads, and each gets the same number of rows.
    even = num_rows % num_threads == 0 and gate.numel() > GRAIN * (num_threads - 1)
    if whole or even:
        return F.silu(gate).mul_(up)
    rows_per_call = max(1, (GRAIN - 1) // size)
    return torch.cat([F.silu(rows) for rows in gate.split(rows_per_call)]).mul_(up)
