"""Check whether the parts before and after a model's layers are native too: embedding, last norm, head."""

from baton.engine.layers.embedding import Embedding, PackedEmbedding
from baton.engine.layers.linear.packed import PackedLinear
from baton.engine.layers.norm import RMSNorm
from baton.engine.models.decoder import Model


def has_native_ends(model: Model) -> bool:
    """Return whether native code can look up tokens and apply norm and head."""
    table = model.embedding
    in_dtype = isinstance(table, Embedding) and table.weight.dtype == model.dtype and table.weight.is_contiguous()
    return (
        isinstance(model.norm, RMSNorm)
        and isinstance(model.head, PackedLinear)
        and (in_dtype or isinstance(table, PackedEmbedding))
    )


def table_address(model: Model) -> int | None:
    """Return the address of the embedding's rows; None if they are in the panels of the head."""
    return model.embedding.weight.data_ptr() if isinstance(model.embedding, Embedding) else None


def norm_address(model: Model) -> int:
    """Return the address of the last norm's weight."""
    assert isinstance(model.norm, RMSNorm)
    return model.norm.weight.data_ptr()


def head_address(model: Model) -> int:
    """Return the address of the head's struct."""
    assert isinstance(model.head, PackedLinear)
    return model.head.address
