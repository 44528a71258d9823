"""Signatures of reasoning in Anthropic's form. Another service proves by them whose words it is. Here they prove
nothing, and one has the reasoning in it where that is not displayed, so that it comes back in the next request."""

import base64

_NONE = "unsigned"  # clients send no reasoning back that has no signature
_HIDDEN = f"{_NONE}:"


def sign(reasoning: str, hides: bool) -> str:
    """Return the signature. `hides`: the reasoning is not displayed."""
    return _HIDDEN + base64.b64encode(reasoning.encode()).decode() if hides else _NONE


def hidden_in(signature: object) -> str:
    """Return the reasoning that a signature has in it, "" for one of another service."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""
