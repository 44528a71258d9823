"""The secret by which the gateways of a cluster name the spans of prompts."""

import pytest

from baton.service.settings import SettingsError
from gateway.prefix.cluster_secret import derived_secret, fingerprint, read_secret


def test_a_secret_is_read_and_its_fingerprint_does_not_tell_it(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of enough bytes\n")
    secret = read_secret(path)
    assert fingerprint(secret) != fingerprint(derived_secret(b"i" * 32)) and secret[:8] not in fingerprint(secret)
    path.write_text("short")
    for broken in (path, tmp_path / "missing"):
        with pytest.raises(SettingsError, match="--cluster-secret"):
            read_secret(broken)
