"""The product that bench/compiled.py lets torch compile equals our kernels'."""

import torch

from baton.engine.weights.forms import IntWeight
from bench import compiled


def test_the_compiled_products_are_those_of_torch():
    torch.manual_seed(0)
    x = torch.randn(128).bfloat16()
    dense = torch.randn(24, 128).bfloat16()
    torch.testing.assert_close(compiled.bf16(dense, x), dense.float() @ x.float())
    packed, scales = torch.randint(0, 256, (24, 64), dtype=torch.uint8), torch.rand(24, 4)
    wanted = IntWeight(4, packed, scales, compiled.GROUP).dequantize().float() @ x.float()
    torch.testing.assert_close(compiled.int4(packed, scales, x), wanted)
