"""The dtypes in which torch multiplies matrices."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Products(TorchDispatchMode):
    """`with Products() as products: ...`; `products.dtypes` then has those of all operands, gradients included."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _PRODUCTS:
            self.dtypes |= {operand.dtype for operand in args if isinstance(operand, torch.Tensor)}
        return func(*args, **(kwargs or {}))
