"""Names are part of the contract between versions: these vectors must never change."""

import hashlib
import struct

import pytest

from kvtransfer import naming

IDENTITY = naming.model_identity(b"config", b"weights", b"tokenizer")
ROOT = naming.root_hash(IDENTITY)
VECTORS = [  # identity, root, root of an adapter, two spans, a tenant's salt
    "16e89faedf380d49",
    "01b7da19a5b2b3bf",
    "ccaee866fdd6e722",
    "8b877b86c5d2b2ab",
    "4ed8f595ab7bfb22",
    "6e886773117acbdf",
]


def test_stable_vectors():
    chain = naming.chain_hashes(ROOT, range(128))
    names = [IDENTITY, ROOT, naming.root_hash(IDENTITY, "lora"), *chain, naming.tenant_salt(b"secret", "default")]
    assert [name.hex()[:16] for name in names] == VECTORS


def test_a_span_is_what_the_page_says():
    packed = b"".join(struct.pack("<I", token) for token in range(64))
    assert naming.span_hash(ROOT, range(64)) == hashlib.sha256(ROOT + packed).digest()


def test_chain_covers_full_spans_only():
    chain = naming.chain_hashes(ROOT, range(200))
    assert len(chain) == 3 and chain[:2] == naming.chain_hashes(ROOT, range(191))[:2]
    assert chain[2] == naming.span_hash(chain[1], range(128, 192))
    assert naming.chain_hashes(ROOT, range(63)) == []


def test_one_token_changes_every_later_name():
    changed = [*range(70), 9, *range(71, 192)]
    ours, theirs = naming.chain_hashes(ROOT, range(192)), naming.chain_hashes(ROOT, changed)
    assert ours[0] == theirs[0] and ours[1] != theirs[1] and ours[2] != theirs[2]


def test_tenants_share_no_name_behind_the_salt():
    salts = [naming.tenant_salt(b"secret", tenant) for tenant in ("a", "b")]
    chains = [naming.chain_hashes(naming.salted(ROOT, salt), range(64)) for salt in salts]
    assert chains[0] != chains[1]


def test_a_span_has_64_tokens():
    with pytest.raises(ValueError, match="64"):
        naming.span_hash(ROOT, range(63))


def test_longest_known_run():
    chain = naming.chain_hashes(ROOT, range(256))
    assert naming.num_matched_spans(chain, {chain[0], chain[1], chain[3]}) == 2
    assert naming.num_matched_spans(chain, set()) == 0
