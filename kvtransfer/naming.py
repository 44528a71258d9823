"""Name KV spans: a chain of SHA-256 over spans of 64 tokens, whatever a worker's block size.

Two prompts share a span hash exactly when they share the model, the adapter, the tenant's salt and every token up to
the end of the span. Plain Python: the gateway imports this without torch."""

import hashlib
import hmac
import struct
from collections.abc import Container, Iterable, Sequence
from typing import NewType

SpanHash = NewType("SpanHash", bytes)
ModelIdentity = NewType("ModelIdentity", bytes)

SPAN_TOKENS = 64
HASH_BYTES = 32
FORMAT_VERSION = b"baton-span-1"


def model_identity(config: bytes, weight_manifest: bytes, tokenizer: bytes) -> ModelIdentity:
    """Return the digest (32 bytes) of config, weights and tokenizer; workers with the same digest can exchange KV."""
    digest = hashlib.sha256()
    for part in (config, weight_manifest, tokenizer):
        digest.update(hashlib.sha256(part).digest())
    return ModelIdentity(digest.digest())


def root_hash(identity: ModelIdentity, adapter: str = "") -> SpanHash:
    """Return the parent of the first span of every public prefix of this model."""
    return SpanHash(hashlib.sha256(FORMAT_VERSION + identity + adapter.encode()).digest())


def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    """Return the tenant's 32-byte salt, HMAC(cluster secret, tenant). Only gateways have the secret."""
    return hmac.digest(cluster_secret, tenant.encode(), "sha256")


def salted(parent: SpanHash, salt: bytes) -> SpanHash:
    """Return the parent of the first private span: spans after it have names that no other tenant shares."""
    return SpanHash(hashlib.sha256(parent + salt).digest())


def span_hash(parent: SpanHash, token_ids: Sequence[int]) -> SpanHash:
    """Return SHA-256(parent, 64 token ids as little-endian uint32). Raises ValueError for another number of ids."""
    if len(token_ids) != SPAN_TOKENS:
        raise ValueError(f"a span is {SPAN_TOKENS} tokens, got {len(token_ids)}")
    return SpanHash(hashlib.sha256(parent + struct.pack(f"<{SPAN_TOKENS}I", *token_ids)).digest())


def chain_hashes(parent: SpanHash, token_ids: Sequence[int]) -> list[SpanHash]:
    """Return the hashes of the full spans of `token_ids`, each the parent of the next; tokens after the last full span
    have none."""
    hashes: list[SpanHash] = []
    for begin in range(0, len(token_ids) - SPAN_TOKENS + 1, SPAN_TOKENS):
        parent = span_hash(parent, token_ids[begin : begin + SPAN_TOKENS])
        hashes.append(parent)
    return hashes


def num_matched_spans(hashes: Iterable[SpanHash], known: Container[SpanHash]) -> int:
    """Return how many leading `hashes` are in `known`, up to the first that is not."""
    count = 0
    for value in hashes:
        if value not in known:
            break
        count += 1
    return count
