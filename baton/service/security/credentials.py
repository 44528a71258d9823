"""Authenticate clients: by keys that are stored as hashes, or tokens that an identity provider has signed.

    [keys.k4f1c2d3]                      # the id, which is part of the key itself: baton.k4f1c2d3.<43 characters>
    tenant = "acme"
    sha256 = "…"                         # of the whole key, in hex
    expires = 2027-01-01T00:00:00Z       # optional

    [jwt]
    algorithm = "EdDSA"                  # the one that is accepted: EdDSA, ES256 or RS256
    public_key = "issuer.pem"            # beside this file
    audience = "baton"
    issuer = "https://login.example"     # optional
    tenant_claim = "tenant"              # optional, this is the default

A key is 256 random bits, so one round of SHA-256 is enough: slow hashes are for what people think up, and would cost
every request 50 ms. The file, and the issuer's, are read again when one has changed; one that cannot be read changes
nothing.
"""

import datetime
import hashlib
import hmac
import logging
import re
import secrets
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from baton.protocol import DEFAULT_TENANT
from baton.service.errors import Unauthenticated
from baton.service.file_stamp import file_stamp
from baton.service.logs import fields
from baton.service.settings import SettingsError

TENANT = re.compile(r"[A-Za-z0-9_-]{1,64}")
ALGORITHMS = ("EdDSA", "ES256", "RS256")  # no symmetric algorithm, whose verifier could sign
_KEY_ID = re.compile(r"[A-Za-z0-9]{1,32}")
_LOOK_S = 1.0  # between two checks of the file
_LEEWAY_S = 10  # for clocks that differ
_MAX_BEARER_CHARS = 4096
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).digest()

log = logging.getLogger(__name__)


def check_tenant(name: object) -> str:
    """Return the name if it is valid. Raises ValueError, whose message does not repeat the name."""
    if not isinstance(name, str) or not TENANT.fullmatch(name):
        raise ValueError(f"must be a string that matches {TENANT.pattern}")
    if name == DEFAULT_TENANT:
        raise ValueError(f"{name} is the tenant of callers without a credential: choose another name")
    return name


def new_key() -> tuple[str, str, str]:
    """Return (key, its id, its sha256 in hex)."""
    key_id = "k" + secrets.token_hex(4)
    key = f"baton.{key_id}.{secrets.token_urlsafe(32)}"
    return key, key_id, hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class _Key:
    tenant: str
    digest: bytes
    expires: float  # in seconds since 1970, as time.time()


@dataclass(frozen=True)
class _Jwt:
    algorithm: str
    public_key: bytes
    audience: str
    issuer: str | None
    tenant_claim: str
    key_file: Path
    key_stamp: tuple[int, ...] | None

    def tenant(self, token: str) -> str:
        """Return the tenant of a signed token. Raises Unauthenticated."""
        import jwt

        try:
            claims = jwt.decode(
                token,
                self.public_key,
                algorithms=[self.algorithm],
                audience=self.audience,
                issuer=self.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "aud", *(["iss"] if self.issuer else [])]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired", reason="CREDENTIAL_EXPIRED") from None
        except (jwt.PyJWTError, ValueError):
            raise _unknown() from None
        try:
            return check_tenant(claims.get(self.tenant_claim))
        except ValueError:
            raise _unknown() from None


class Credentials:
    """The credentials of one file. `tenant(bearer)` belongs to one thread."""

    def __init__(self, path: Path):
        """Read the file. Raises SettingsError: one line that names the place in the file."""
        self._path = path
        self._keys, self._jwt, self._stamp = {}, None, None
        self._read()
        self._looked_at = time.monotonic()

    def tenant(self, bearer: str) -> str:
        """Return the tenant of a credential. Raises Unauthenticated, with the same message for every reason that a
        credential is unknown."""
        self._look_again()
        if len(bearer) > _MAX_BEARER_CHARS:
            raise _unknown()
        if self._jwt is not None and not bearer.startswith("baton."):
            return self._jwt.tenant(bearer)
        key = self._keys.get(bearer.split(".")[1] if bearer.count(".") == 2 else "")
        digest = hashlib.sha256(bearer.encode()).digest()
        is_known = hmac.compare_digest(digest, key.digest if key else _NOBODY)
        if key is None or not is_known:
            raise _unknown()
        if time.time() >= key.expires:
            raise Unauthenticated("the key has expired", reason="CREDENTIAL_EXPIRED")
        return key.tenant

    def _look_again(self) -> None:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            if self._has_changed():
                self._read()
                log.info("credentials read again %s", fields(keys=len(self._keys)))
        except SettingsError as error:
            log.error("credentials: the old ones stay in use %s", fields(error=error))

    def _has_changed(self) -> bool:
        if file_stamp(self._path) != self._stamp:
            return True
        return self._jwt is not None and file_stamp(self._jwt.key_file) != self._jwt.key_stamp

    def _read(self) -> None:
        try:
            stamp, table = file_stamp(self._path), tomllib.loads(self._path.read_text())
        except OSError as error:
            raise SettingsError(f"--credentials {self._path}: {error.strerror}") from None
        except ValueError:  # the parser's message would show the line
            raise SettingsError(f"--credentials {self._path}: not TOML") from None
        try:
            keys = {key_id: _key(key_id, entry) for key_id, entry in _table("keys", table.pop("keys", {})).items()}
            jwt = _jwt(_table("jwt", table.pop("jwt")), self._path.parent) if "jwt" in table else None
            if table:
                raise ValueError(f"unknown table {next(iter(table))}; there are keys and jwt")
            if not keys and jwt is None:
                raise ValueError("holds neither keys nor jwt")
        except ValueError as error:
            raise SettingsError(f"--credentials {self._path}: {error}") from None
        self._keys, self._jwt, self._stamp = keys, jwt, stamp


def _table(where: str, value: object) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a table")
    return value


def _key(key_id: str, entry: object) -> _Key:
    where = f"keys.{key_id[:32]}"
    entry = _table(where, entry)
    if not _KEY_ID.fullmatch(key_id):
        raise ValueError(f"{where}: an id is 1 to 32 letters and digits")
    if unknown := entry.keys() - {"tenant", "sha256", "expires"}:
        raise ValueError(f"{where}: unknown {unknown.pop()}; there are tenant, sha256 and expires")
    try:
        check_tenant(entry.get("tenant"))
    except ValueError as error:
        raise ValueError(f"{where}.tenant: {error}") from None
    digest = entry.get("sha256")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{where}.sha256: must be 64 hexadecimal digits")
    expires = entry.get("expires")
    if expires is not None and not (isinstance(expires, datetime.datetime) and expires.tzinfo):
        raise ValueError(f"{where}.expires: must be a time with its zone, for instance 2027-01-01T00:00:00Z")
    return _Key(entry["tenant"], bytes.fromhex(digest), expires.timestamp() if expires else float("inf"))


def _jwt(entry: dict, folder: Path) -> _Jwt:
    if unknown := entry.keys() - {"algorithm", "public_key", "audience", "issuer", "tenant_claim"}:
        raise ValueError(f"jwt: unknown {unknown.pop()}")
    for name, value in entry.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"jwt.{name}: must be a string that is not empty")
    if entry.get("algorithm") not in ALGORITHMS:
        raise ValueError(f"jwt.algorithm: one of {', '.join(ALGORITHMS)}")
    if "audience" not in entry:
        raise ValueError("jwt.audience is missing")
    key_file = folder / entry.get("public_key", "")
    try:
        key_stamp, public_key = file_stamp(key_file), key_file.read_bytes()
    except OSError as error:
        raise ValueError(f"jwt.public_key: {error.strerror}") from None
    if b"BEGIN PUBLIC KEY" not in public_key:
        raise ValueError("jwt.public_key: not a public key in PEM")
    issuer, tenant_claim = entry.get("issuer"), entry.get("tenant_claim", "tenant")
    return _Jwt(entry["algorithm"], public_key, entry["audience"], issuer, tenant_claim, key_file, key_stamp)


def _unknown() -> Unauthenticated:
    return Unauthenticated("the credential is not known here")
