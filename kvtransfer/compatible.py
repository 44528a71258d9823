"""Decide whether one worker's KV may feed another: by the numerics class and the layout of both, nothing else.

exact     the same numerics class: every bit as if the taker had computed it; block sizes may differ
mixed     the same model, the taker's form equal or lossier, any tensor-parallel degree, other kernels
refused   another model or shape, a finer form on the taker's side, or a side that wants exact and is not
"""

from kvtransfer.errors import LayoutMismatch
from kvtransfer.layout import KV_FORMS, STATE, KVLayout, NumericsClass

EXACT, MIXED = "exact", "mixed"


def converts(source_form: str, taker_form: str) -> bool:
    """Return whether a copy may change form so: the same or a lossier form, never a finer one."""
    return source_form == taker_form or KV_FORMS[source_form].lossiness < KV_FORMS[taker_form].lossiness


def relation(
    source: KVLayout, source_numerics: str, taker: KVLayout, taker_numerics: str, *, is_strict: bool = False
) -> str:
    """Return EXACT or MIXED for two workers; layouts are those of the whole model. Raises LayoutMismatch, which prints
    both."""
    reason = _reason(source, source_numerics, taker, taker_numerics, is_strict)
    if reason:
        ours, theirs = f"{source} as {source_numerics}", f"{taker} as {taker_numerics}"
        raise LayoutMismatch(f"{reason}: the source keeps {ours}, the taker {theirs}")
    return EXACT if source_numerics == taker_numerics else MIXED


def _reason(source: KVLayout, source_numerics: str, taker: KVLayout, taker_numerics: str, is_strict: bool) -> str:
    if _shape(source) != _shape(taker):
        return "other layers, heads or groups"
    for ours, theirs in zip(source.groups, taker.groups):
        if not converts(ours.form, theirs.form):
            return f"{ours.form} cannot become {theirs.form}"
    if source_numerics == taker_numerics:
        return ""
    if is_strict:
        return "strict numerics: another numerics class"
    if _identity(source_numerics) != _identity(taker_numerics):
        return "another model"
    return ""


def gives(layout: KVLayout, numerics: str, *, is_strict: bool = False) -> list[str]:
    """Return words that describe a worker's KV: it may feed any worker that `takes` one of them. Opaque to others."""
    words = [f"{_shape(layout)} class {numerics}"]
    if not is_strict:
        words.append(_general(layout, numerics, tuple(group.form for group in layout.groups)))
    return words


def takes(layout: KVLayout, numerics: str, *, is_strict: bool = False) -> list[str]:
    """Return words for the KV that a worker can be fed with."""
    words = [f"{_shape(layout)} class {numerics}"]
    if not is_strict:
        # All groups of KV keep one form, and a state keeps its own.
        own = layout.groups[0].form
        for form in (form for form in KV_FORMS if converts(form, own)):
            forms = tuple(group.form if group.kind == STATE else form for group in layout.groups)
            words.append(_general(layout, numerics, forms))
    return words


def _general(layout: KVLayout, numerics: str, forms: tuple[str, ...]) -> str:
    return f"{_shape(layout)} model {_identity(numerics)} form {'+'.join(forms)}"


def _shape(layout: KVLayout) -> str:
    """Describe what no conversion changes."""
    groups = (f"{g.kind}:{g.num_layers}x{g.num_kv_heads}x{g.head_dim}" for g in layout.groups)
    return f"v{layout.version} {'+'.join(groups)}"


def _identity(numerics: str) -> str:
    """Return the model identity of a numerics class; a class that cannot be read matches only itself."""
    try:
        return NumericsClass.parse(numerics).identity
    except ValueError:
        return numerics
