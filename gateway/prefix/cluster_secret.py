"""The cluster secret: the salt of span names. Only gateways read it, and all that share an index must have the same."""

import hashlib
import hmac
from pathlib import Path

from baton.service.settings import SettingsError
from kvtransfer.naming import ModelIdentity

_MIN_BYTES = 16
NO_SECRET = b"derived from each model"  # what a gateway without a secret compares with others


def read_secret(path: Path) -> bytes:
    """Return the secret in a file. Raises SettingsError, one line."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"--cluster-secret {path}: {error.strerror}") from None
    if len(secret) < _MIN_BYTES:
        raise SettingsError(f"--cluster-secret {path}: has {len(secret)} bytes, at least {_MIN_BYTES} are needed")
    return secret


def derived_secret(identity: ModelIdentity) -> bytes:
    """Return bytes in place of a secret, which anyone with the model can compute. For loopback only."""
    return hashlib.sha256(b"baton-secret-of-nobody" + identity).digest()


def fingerprint(secret: bytes) -> bytes:
    """Return bytes that are equal for equal secrets, and reveal nothing else."""
    return hmac.digest(secret, b"baton-secret-fingerprint", "sha256")[:16]
