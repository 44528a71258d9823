"""Keys and signed tokens: what is accepted, what is not, and in which words."""

import datetime
import hashlib
import hmac
import json
import random
import statistics
import time
from base64 import urlsafe_b64encode

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from baton.service.errors import Unauthenticated
from baton.service.security import credentials as module
from baton.service.security.credentials import Credentials, new_key
from baton.service.settings import SettingsError

NOW = int(time.time())
LATER = NOW + 86_400  # than these tests are run, wherever they were collected


def entry(key_id: str, digest: str, tenant: str, more: str = "") -> str:
    return f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{digest}"\n{more}\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.0)  # the file is looked at with every call
    return tmp_path


def refused(credentials: Credentials, bearer: str) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as caught:
        credentials.tenant(bearer)
    return caught.value


# ---- keys ----


def test_a_key_says_whose_it_is_and_others_say_nothing(folder):
    (one, one_id, one_digest), (two, two_id, two_digest) = new_key(), new_key()
    path = folder / "c.toml"
    path.write_text(entry(one_id, one_digest, "acme") + entry(two_id, two_digest, "globex"))
    credentials = Credentials(path)
    assert (credentials.tenant(one), credentials.tenant(two)) == ("acme", "globex")
    told = {
        str(refused(credentials, bearer))
        for bearer in (
            "", "x", one[:-1], one + "x", one.upper(), one.replace(one_id, two_id), f"baton.{one_id}.", one_digest,
            new_key()[0], "baton..", "ü" * 50, "x" * 5000, "\x00",
        )
    }  # fmt: skip
    assert told == {"the credential is not known here"}


def test_the_file_holds_no_key(installation):
    text = (installation.folder / "credentials.toml").read_text()
    assert installation.api_key.split(".")[2] not in text
    assert hashlib.sha256(installation.api_key.encode()).hexdigest() in text


def test_keys_expire(folder):
    key, key_id, digest = new_key()
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    path = folder / "c.toml"
    path.write_text(entry(key_id, digest, "acme", f"expires = {soon.isoformat()}"))
    assert Credentials(path).tenant(key) == "acme"
    path.write_text(entry(key_id, digest, "acme", "expires = 2020-01-01T00:00:00Z"))
    assert refused(Credentials(path), key).reason == "CREDENTIAL_EXPIRED"


def test_the_file_is_read_again_and_a_torn_one_is_not(folder):
    (one, one_id, one_digest), (two, two_id, two_digest) = new_key(), new_key()
    path = folder / "c.toml"
    path.write_text(entry(one_id, one_digest, "acme"))
    credentials = Credentials(path)
    path.write_text(entry(two_id, two_digest, "globex"))
    assert credentials.tenant(two) == "globex"
    refused(credentials, one)  # revoked
    path.write_text('[keys.k1]\ntenant = "ac')
    assert credentials.tenant(two) == "globex"
    path.unlink()
    assert credentials.tenant(two) == "globex"


BAD = [
    ("", "holds neither"),
    ("x = 1", "unknown table x"),
    ("[keys.k1]", "keys.k1.tenant"),
    ('[keys.k1]\ntenant = "a b"\nsha256 = "00"', "keys.k1.tenant"),
    ('[keys.k1]\ntenant = "a"\nsha256 = "00"', "keys.k1.sha256"),
    (f'[keys.k1]\ntenant = 5\nsha256 = "{"0" * 64}"', "keys.k1.tenant: must be a string"),
    (f'[keys.k1]\ntenant = true\nsha256 = "{"0" * 64}"', "keys.k1.tenant: must be a string"),
    (f'[keys.k1]\ntenant = "default"\nsha256 = "{"0" * 64}"', "default is the tenant of callers without a credential"),
    (f'[keys.k1]\ntenant = "a"\nsha256 = {"1" * 64}', "keys.k1.sha256"),
    ("keys = 5", "keys: must be a table"),
    ('[keys]\nk1 = "x"', "keys.k1: must be a table"),
    ("jwt = 5", "jwt: must be a table"),
    ('[jwt]\nalgorithm = "EdDSA"\naudience = 5', "jwt.audience: must be a string"),
    ('[jwt]\nalgorithm = "EdDSA"\naudience = "a"\ntenant_claim = ["t"]', "jwt.tenant_claim: must be a string"),
    ('[jwt]\nalgorithm = "EdDSA"\naudience = "a"\npublic_key = 5', "jwt.public_key: must be a string"),
    (f'[keys.k1]\ntenant = "a"\nsha256 = "{"0" * 64}"\nexpires = 5', "keys.k1.expires"),
    (f'[keys.k1]\ntenant = "a"\nsha256 = "{"0" * 64}"\nkey = "x"', "unknown key"),
    (f'[keys."k 1"]\ntenant = "a"\nsha256 = "{"0" * 64}"', "an id is"),
    ('[jwt]\nalgorithm = "none"', "jwt.algorithm"),
    ('[jwt]\nalgorithm = "HS256"', "jwt.algorithm"),
    ('[jwt]\nalgorithm = "EdDSA"', "jwt.audience"),
    ('[jwt]\nalgorithm = "EdDSA"\naudience = "a"\npublic_key = "none.pem"', "jwt.public_key"),
    ("not TOML at all", "not TOML"),
]


@pytest.mark.parametrize("text, words", BAD, ids=[words for _, words in BAD])
def test_a_file_that_cannot_be_used_says_where(folder, text, words):
    path = folder / "c.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        Credentials(path)


def test_a_missing_file_of_credentials_is_refused(folder):
    with pytest.raises(SettingsError, match="No such file"):
        Credentials(folder / "none.toml")


# ---- signed tokens ----


@pytest.fixture
def issuer(folder):
    """(credentials, sign(claims, **more))"""
    private = ed25519.Ed25519PrivateKey.generate()
    (folder / "issuer.pem").write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    path = folder / "c.toml"
    path.write_text('[jwt]\nalgorithm = "EdDSA"\npublic_key = "issuer.pem"\naudience = "baton"\nissuer = "https://i"')
    good = {"aud": "baton", "iss": "https://i", "exp": LATER, "tenant": "acme"}

    def sign(algorithm="EdDSA", key=private, **claims) -> str:
        claims = {name: value for name, value in {**good, **claims}.items() if value is not None}
        return jwt.encode(claims, key, algorithm)

    return Credentials(path), sign


def test_a_signed_token_says_whose_it_is(issuer):
    credentials, sign = issuer
    assert credentials.tenant(sign()) == "acme"
    assert credentials.tenant(sign(aud=["other", "baton"])) == "acme"


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "other"}, {"aud": None}, {"exp": None}, {"iss": "https://j"}, {"iss": None}, {"tenant": None},
        {"tenant": ""}, {"tenant": "a b"}, {"tenant": ["acme"]}, {"tenant": 5}, {"tenant": "default"}, {"tenant": "*{}\n"},
        {"nbf": LATER}, {"exp": "soon"},
    ],
    ids=lambda claims: next(iter(claims)),
)  # fmt: skip
def test_a_claim_that_is_wrong(issuer, claims):
    credentials, sign = issuer
    refused(credentials, sign(**claims))


def test_another_key_of_the_issuer(issuer, folder):
    """Its file alone is replaced, as by a rotation: the old key's tokens are worth nothing from then on."""
    credentials, sign = issuer
    token, other = sign(), ed25519.Ed25519PrivateKey.generate()
    assert credentials.tenant(token) == "acme"
    public = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "next.pem").write_bytes(public)
    (folder / "next.pem").rename(folder / "issuer.pem")
    refused(credentials, token)
    assert credentials.tenant(sign(key=other)) == "acme"


def test_an_old_token(issuer):
    credentials, sign = issuer
    assert refused(credentials, sign(exp=NOW - 60)).reason == "CREDENTIAL_EXPIRED"


def test_the_algorithm_is_the_file_s_and_never_the_token_s(issuer, folder):
    """`none`, and HS256 with the public key as its secret: the two classics."""
    credentials, sign = issuer
    header, payload, _ = sign().split(".")
    public = (folder / "issuer.pem").read_bytes()

    def part(value) -> str:
        return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    refused(credentials, f"{part({'alg': 'none'})}.{payload}.")
    forged = f"{part({'alg': 'HS256'})}.{payload}"
    mac = urlsafe_b64encode(hmac.digest(public, forged.encode(), "sha256")).decode().rstrip("=")
    refused(credentials, f"{forged}.{mac}")
    other = rsa.generate_private_key(65537, 2048)
    refused(credentials, sign("RS256", other))
    refused(credentials, sign(key=ed25519.Ed25519PrivateKey.generate()))
    refused(credentials, f"{header}.{payload}.{'A' * 86}")


def test_a_private_key_is_no_public_one(folder):
    private = ed25519.Ed25519PrivateKey.generate()
    (folder / "issuer.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "c.toml").write_text('[jwt]\nalgorithm = "EdDSA"\npublic_key = "issuer.pem"\naudience = "baton"')
    with pytest.raises(SettingsError, match="not a public key"):
        Credentials(folder / "c.toml")


# ---- what the time of an answer tells (S13) ----


def matching_prefixes(key: str, num: int, rng: random.Random) -> list[tuple[int, str]]:
    """(length of the secret's part that is right, a key with that part right)"""
    head, secret = key.rpartition(".")[0], key.rpartition(".")[2]
    lengths = [rng.randrange(len(secret)) for _ in range(num)]
    return [(right, f"{head}.{secret[:right]}{'_' * (len(secret) - right)}") for right in lengths]


@pytest.mark.long
def test_a_key_that_is_half_right_takes_no_longer(tmp_path):
    """10^5 tries; the correlation of the time with the length of the right prefix is printed."""
    key, key_id, digest = new_key()
    (tmp_path / "c.toml").write_text(entry(key_id, digest, "acme"))
    credentials = Credentials(tmp_path / "c.toml")
    rights, times = [], []
    for right, tried in matching_prefixes(key, 100_000, random.Random(7)):
        begun = time.perf_counter_ns()
        refused(credentials, tried)
        rights.append(right)
        times.append(time.perf_counter_ns() - begun)
    limit = statistics.quantiles(times, n=20)[-1]  # interrupts are no evidence
    kept = [(right, spent) for right, spent in zip(rights, times) if spent <= limit]
    correlation = statistics.correlation(*zip(*kept))
    print(f"{len(kept)} tries, correlation {correlation:+.4f}")
    assert abs(correlation) < 0.05
