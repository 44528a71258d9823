"""Which attention backend a model gets, and why the others were passed over."""

from baton.engine.attention.base import Attention, AttentionShape
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.attention.sdpa import SdpaAttention

BACKENDS = {backend.name: backend for backend in (SdpaAttention, ReferenceAttention)}  # fastest first


def choose(name: str, shape: AttentionShape, batch_invariant: bool = True) -> tuple[Attention, dict[str, str]]:
    """The backend for `name` ("auto": the fastest that may be used), and a reason per backend passed over.

    Raises ValueError with the reason where the one asked for does not exist or may not be used.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"attention backend {name!r}: one of auto, {', '.join(BACKENDS)}")
    reasons: dict[str, str] = {}
    for known, make in BACKENDS.items():
        if name not in ("auto", known):
            reasons[known] = f"{name} was asked for"
            continue
        backend = make(shape)
        if batch_invariant and not backend.batch_invariant:
            reasons[known] = "a row's bits depend on what shares its batch on this CPU, refused in batch-invariant mode"
            continue
        for other in BACKENDS:
            if other != known:
                reasons.setdefault(other, f"{known} was " + ("chosen" if name == "auto" else "asked for"))
        return backend, reasons
    raise ValueError(f"attention backend {name!r}: {reasons[name]}")
