"""Triton's interpreter (3.6.0) under numpy 2.4: `range` over a value that a kernel computed needs an index, which it
takes from an array of one element, and numpy no longer converts that."""

from triton.runtime import interpreter


def mend() -> None:
    """Every scalar of an interpreted kernel can be a bound of `range`."""
    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_index
