"""Signatures of reasoning in Anthropic's form, which at other services prove its origin. Here they prove nothing, but
carry reasoning that is not displayed, so that it comes back in the next request."""

import base64

_NONE = "unsigned"  # clients do not send back reasoning without a signature
_HIDDEN = f"{_NONE}:"


def sign(reasoning: str, hides: bool) -> str:
    """Return a signature, which contains the reasoning if `hides`: it is not displayed."""
    return _HIDDEN + base64.b64encode(reasoning.encode()).decode() if hides else _NONE


def hidden_in(signature: object) -> str:
    """Return the reasoning in a signature; "" if there is none, or it is another service's."""
    if not isinstance(signature, str) or not signature.startswith(_HIDDEN):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""
