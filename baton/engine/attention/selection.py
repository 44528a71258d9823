"""Choose the attention backend of a model, and give the reasons against the others."""

from baton.engine.attention.base import Attention, AttentionShape
from baton.engine.attention.flash import FlashAttention2, FlashAttention3, FlashAttention4
from baton.engine.attention.flashinfer import FlashInferAttention
from baton.engine.attention.native import NativeAttention
from baton.engine.attention.reference import ReferenceAttention
from baton.engine.attention.sdpa import SdpaAttention
from baton.engine.attention.triton_paged import FastTritonAttention, TritonAttention

# In the order of preference. Those whose decode step is one CUDA graph come first; of these flash4, which does not
# split a long context, comes after those that do.
BACKENDS = {
    backend.name: backend
    for backend in (
        NativeAttention, FlashAttention3, FlashAttention2, FastTritonAttention, TritonAttention, FlashAttention4,
        FlashInferAttention, SdpaAttention, ReferenceAttention,
    )
}  # fmt: skip
NOT_EXACT = "a row's bits depend on what shares its batch on this machine, refused in batch-invariant mode"


def choose(name: str, shape: AttentionShape, batch_invariant: bool = True) -> tuple[Attention, dict[str, str]]:
    """Return the backend for `name` ("auto": the first that may be used), and a reason for each backend passed over.

    Raises ValueError, with the reason and with what would fit, if the backend asked for does not exist or may not be
    used.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"attention backend {name!r}: one of auto, {', '.join(BACKENDS)}")
    reasons: dict[str, str] = {}
    for known, make in BACKENDS.items():
        if name not in ("auto", known):
            reasons[known] = f"{name} was asked for"
            continue
        if name == "auto" and (reason := make.unfit(shape) or make.avoid(shape)):
            reasons[known] = reason
            continue
        backend = make_or_say(known, shape, batch_invariant)
        if isinstance(backend, str):
            reasons[known] = backend
            continue
        for other in BACKENDS:
            if other != known:
                reasons.setdefault(other, f"{known} was " + ("chosen" if name == "auto" else "asked for"))
        return backend, reasons
    if name == "auto":
        raise ValueError("no attention backend fits: " + "; ".join(f"{known}: {why}" for known, why in reasons.items()))
    others = (known for known, make in BACKENDS.items() if known != name and not make.avoid(shape))
    fitting = [known for known in others if not isinstance(make_or_say(known, shape, batch_invariant), str)]
    raise ValueError(f"attention backend {name!r}: {reasons[name]}; what fits: {', '.join(fitting) or 'nothing'}")


def make_or_say(name: str, shape: AttentionShape, batch_invariant: bool) -> Attention | str:
    """Return the backend, or why it may not be used."""
    if reason := BACKENDS[name].unfit(shape):
        return reason
    backend = BACKENDS[name](shape)
    return backend if backend.batch_invariant or not batch_invariant else NOT_EXACT
