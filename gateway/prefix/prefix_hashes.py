"""Name the spans of a prompt. The first span that the operator has not made public is salted by tenant, and so all
after it: one tenant never finds what another has cached."""

import hmac
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from baton.protocol import DEFAULT_TENANT
from kvtransfer.naming import (
    SPAN_TOKENS,
    ModelIdentity,
    SpanHash,
    chain_hashes,
    num_matched_spans,
    root_hash,
    salted,
    tenant_salt,
)

_MARK_BYTES = 12


class IdentitySource(Protocol):
    """What knows the secret and which model is served."""

    @property
    def secret(self) -> bytes:
        """The secret that tenants' salts are derived from."""
        ...

    def known_identity(self) -> ModelIdentity:
        """Return the model's identity. Raises Unavailable before a worker has reported it."""
        ...


class SpanHashes(NamedTuple):
    """The names of a prompt's full spans, which are their hashes."""

    hashes: list[SpanHash]
    parent: SpanHash  # the hash from which the next span's is made


class PrefixHashes:
    """Name spans of prompts for the model of `source`. `make_public` may only be called before the first request."""

    def __init__(self, source: IdentitySource):
        self._source = source
        self._prompts: tuple[tuple[int, ...], ...] = ()
        self._public: tuple[ModelIdentity | None, frozenset[SpanHash]] = (None, frozenset())

    def make_public(self, prompts: Iterable[Sequence[int]]) -> None:
        """Give the full spans of these prompts the same names for all tenants."""
        self._prompts = tuple(map(tuple, prompts))

    def spans(
        self, tenant: str, prompt_ids: Sequence[int], output_ids: Sequence[int] = (), adapter: bytes = b""
    ) -> SpanHashes:
        """Return the names of the full spans of prompt and output together. Output is never public, nor is anything
        that an `adapter` (its identity) has computed. Raises Unavailable before a worker has reported which model is
        served."""
        identity = self._source.known_identity()
        root = root_hash(identity, adapter.hex())
        shared: list[SpanHash] = []
        if not adapter and (public := self._public_of(identity)):
            shared = chain_hashes(root, prompt_ids)
            shared = shared[: num_matched_spans(shared, public)]
        salt = tenant_salt(self._source.secret, tenant)
        first_private = salted(shared[-1] if shared else root, salt)
        token_ids = [*prompt_ids, *output_ids] if output_ids else prompt_ids
        private = chain_hashes(first_private, token_ids[len(shared) * SPAN_TOKENS :])
        return SpanHashes([*shared, *private], private[-1] if private else first_private)

    def mark(self, tenant: str) -> bytes:
        """Return bytes by which workers distinguish tenants without knowing their names; empty for the default
        tenant."""
        if tenant == DEFAULT_TENANT:
            return b""
        return hmac.digest(self._source.secret, b"baton-tenant-mark " + tenant.encode(), "sha256")[:_MARK_BYTES]

    def _public_of(self, identity: ModelIdentity) -> frozenset[SpanHash]:
        if self._public[0] != identity:
            names = (chain_hashes(root_hash(identity), prompt) for prompt in self._prompts)
            self._public = identity, frozenset(name for chain in names for name in chain)
        return self._public[1]
