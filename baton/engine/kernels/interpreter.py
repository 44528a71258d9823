"""Fix Triton's interpreter (3.6.0 to 3.9.0) under numpy 2.4 where tests would otherwise test it instead of a kernel.
`range` over a computed value needs an index, which the interpreter takes from an array of one element, and numpy no
longer converts that. A boolean spread over a tile becomes an integer, which no load accepts as a mask. And OpenBLAS
sums a row of a product by its place in the tile (seen in 0.3.31), which no matrix instruction does."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """Patch the interpreter: every scalar can be a bound of `range`, every comparison a mask, and each row of a product
    is computed by itself."""
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    splat = interpreter.InterpreterBuilder.create_splat

    def patch_and_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot_of_rows(self, a, b, d, *options):
        if a.data.ndim != 2 or a.data.dtype != np.float32 or b.data.dtype != np.float32:
            return dot(self, a, b, d, *options)
        product = np.matmul(a.data[:, None, :], b.data, dtype=d.data.dtype)[:, 0]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def splat_truth(self, tile_type, value):
        found = splat(self, tile_type, value)
        is_truth = value.data.dtype == np.bool_  # of a comparison, whose handle has the type of the compared values
        return interpreter.TensorHandle(found.data != 0, tl.int1) if is_truth else found

    interpreter._patch_lang_tensor = patch_and_index
    interpreter.InterpreterBuilder.create_splat = splat_truth
    interpreter.InterpreterBuilder.create_dot = dot_of_rows
