"""Whether what is before and behind a model's layers is native too: its embedding, its last norm, its head."""

from baton.engine.layers.embedding import Embedding, PackedEmbedding
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.decoder import Model


def has_native_ends(model: Model) -> bool:
    """Return whether native code can look tokens up, and apply norm and head."""
    table = model.embedding
    in_dtype = isinstance(table, Embedding) and table.weight.dtype == model.dtype and table.weight.is_contiguous()
    return (
        isinstance(model.norm, RMSNorm)
        and isinstance(model.head, PackedLinear)
        and (in_dtype or isinstance(table, PackedEmbedding))
    )


def table_address(model: Model) -> int | None:
    """Return the address of the rows of its embedding; None: they are in the panels of the head."""
    return model.embedding.weight.data_ptr() if isinstance(model.embedding, Embedding) else None


def norm_address(model: Model) -> int:
    """Return the address of the weight of its last norm."""
    assert isinstance(model.norm, RMSNorm)
    return model.norm.weight.data_ptr()


def head_address(model: Model) -> int:
    """Return the address of its head's struct."""
    assert isinstance(model.head, PackedLinear)
    return model.head.address
