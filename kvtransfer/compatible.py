"""Decide whether one worker's KV may feed another, from the numerics class and the layout of both.

exact     the same numerics class: every bit is as if the taker had computed it; block sizes may differ
mixed     the same model, and the taker's form is the same or lossier; tensor-parallel degree and kernels may differ
refused   another model or shape, a finer form on the taker's side, or mixed KV for a worker that accepts only exact
"""

from kvtransfer.errors import LayoutMismatch
from kvtransfer.layout import KV_FORMS, STATE, KVLayout, NumericsClass

EXACT, MIXED = "exact", "mixed"


def converts(source_form: str, taker_form: str) -> bool:
    """Return whether KV may be converted from `source_form` to `taker_form`: to the same or a lossier form, never a
    finer one."""
    return source_form == taker_form or KV_FORMS[source_form].lossiness < KV_FORMS[taker_form].lossiness


def relation(
    source: KVLayout, source_numerics: str, taker: KVLayout, taker_numerics: str, *, is_strict: bool = False
) -> str:
    """Return EXACT or MIXED for two workers, given the layouts of their whole models. Raises LayoutMismatch, whose
    message has both layouts."""
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
    """Return labels of a worker's KV. It may feed any worker whose `takes` has one of them; only equality of labels
    matters."""
    words = [f"{_shape(layout)} class {numerics}"]
    if not is_strict:
        words.append(_general(layout, numerics, tuple(group.form for group in layout.groups)))
    return words


def takes(layout: KVLayout, numerics: str, *, is_strict: bool = False) -> list[str]:
    """Return the labels of all KV that may feed a worker."""
    words = [f"{_shape(layout)} class {numerics}"]
    if not is_strict:
        # All groups of KV have one form; a state has its own.
        own = layout.groups[0].form
        for form in (form for form in KV_FORMS if converts(form, own)):
            forms = tuple(group.form if group.kind == STATE else form for group in layout.groups)
            words.append(_general(layout, numerics, forms))
    return words


def _general(layout: KVLayout, numerics: str, forms: tuple[str, ...]) -> str:
    return f"{_shape(layout)} model {_identity(numerics)} form {'+'.join(forms)}"


def _shape(layout: KVLayout) -> str:
    """Describe what no conversion changes: version, kinds of groups, layers, heads."""
    groups = (f"{g.kind}:{g.num_layers}x{g.num_kv_heads}x{g.head_dim}" for g in layout.groups)
    return f"v{layout.version} {'+'.join(groups)}"


def _identity(numerics: str) -> str:
    """Return the model identity of a numerics class; for a class that cannot be parsed, the class itself."""
    try:
        return NumericsClass.parse(numerics).identity
    except ValueError:
        return numerics
