"""`baton certs`: an authority, certificates by role, an API key and a cluster secret, for one installation."""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from baton.service.arguments import add_command, whole
from baton.service.exits import FAILED, WRONG_USE, fail
from baton.service.security.credentials import check_tenant, new_key
from baton.service.security.tls import DECODE, DOMAIN, GATEWAY, OPERATOR, PREFILL, RANK, WORKER_NAME

NAMES = {
    GATEWAY: (f"gateway.{DOMAIN}",),
    PREFILL: (f"prefill.{DOMAIN}", WORKER_NAME),
    DECODE: (f"decode.{DOMAIN}", WORKER_NAME),
    RANK: (f"rank.{DOMAIN}", WORKER_NAME),
    OPERATOR: (f"operator.{DOMAIN}",),
}
_HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
# Of an authority: it outlives the certificates that it signs, so that they can be renewed.
_AUTHORITY_DAYS = 3650
CA_CERT, CA_KEY, CREDENTIALS, API_KEY, SECRET = "ca.crt", "ca.key", "credentials.toml", "api-key", "cluster-secret"


_EXAMPLES = """
baton certs --out certs --host gateway.example.com
baton certs --out certs-next --renew certs
baton up --certs certs --listen 0.0.0.0:50051
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "certs",
        summary="write certificates, an API key and a cluster secret",
        description="Writes what `baton up --certs DIR` reads. Keep ca.key elsewhere: with it, any certificate can be issued.",
        examples=_EXAMPLES,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder; made, never overwritten")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name or address of the gateway (repeatable; localhost and 127.0.0.1 are always included)",
    )
    parser.add_argument("--tenant", metavar="NAME", help="tenant of the API key (default: main)")
    parser.add_argument(
        "--days",
        type=whole,
        default=365,
        metavar="N",
        help="days of validity, of the authority ten years at least (default: %(default)s)",
    )
    parser.add_argument(
        "--renew",
        type=Path,
        metavar="DIR",
        help="only new certificates, signed by DIR's authority, for the hosts of DIR/gateway.crt, if it is there",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the folder; return 0 written, 1 if it exists or cannot be written, 2 for wrong use."""
    tenant = "main" if args.tenant is None else args.tenant
    try:
        check_tenant(tenant)
    except ValueError as error:
        return fail("baton certs", f"--tenant {args.tenant}: {error}", WRONG_USE)
    if args.renew and args.tenant is not None:
        return fail("baton certs", f"--tenant {args.tenant}: no API key is made with --renew", WRONG_USE)
    if (wrong := next((host for host in args.host if not _is_host(host)), None)) is not None:
        return fail("baton certs", f"--host {wrong}: give a host name or an IP address, without a port", WRONG_USE)
    if args.out.exists():
        return fail("baton certs", f"--out {args.out} exists; choose another folder", FAILED)
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True, mode=0o700)
        _write_all(temporary, args, tenant)
        temporary.rename(args.out)
    except OSError as error:
        return fail("baton certs", f"{error.filename or args.out}: {error.strerror}", FAILED)
    except ValueError as error:
        return fail("baton certs", error, WRONG_USE)
    except OverflowError:
        return fail("baton certs", f"--days {args.days}: no certificate is valid beyond the year 9999", WRONG_USE)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(args.out)
    if not args.renew:
        host = args.host[0] if args.host else "localhost"
        host = f"[{host}]" if ":" in host else host
        out, ca, key = (shlex.quote(str(path)) for path in (args.out, args.out / CA_CERT, args.out / API_KEY))
        print(
            "next:\n"
            f"  baton up --certs {out} --listen 0.0.0.0:50051\n"
            f'  baton generate "Hello" --target {host}:50051 --tls-ca {ca} --api-key-file {key}',
            file=sys.stderr,
        )
    return 0


def _write_all(folder: Path, args: argparse.Namespace, tenant: str) -> None:
    authority = Authority.read(args.renew) if args.renew else Authority.make(max(args.days, _AUTHORITY_DAYS))
    if args.renew and authority.until < _in_days(args.days):
        print(f"baton certs: valid until {authority.until:%Y-%m-%d}, when {args.renew / CA_CERT} ends", file=sys.stderr)
    write(folder / CA_CERT, authority.certificate)
    earlier = _names_in(args.renew / f"{GATEWAY}.crt") if args.renew else []
    for role, names in NAMES.items():
        hosts = ["localhost", "127.0.0.1", *earlier, *args.host] if role == GATEWAY else []
        certificate, key = authority.issue(role, dict.fromkeys([*names, *hosts]), args.days)
        write(folder / f"{role}.crt", certificate)
        write(folder / f"{role}.key", key)
    if args.renew:
        return
    write(folder / CA_KEY, authority.key)
    key, key_id, digest = new_key()
    write(folder / API_KEY, f"{key}\n".encode())
    write(folder / CREDENTIALS, f'[keys.{key_id}]\ntenant = "{tenant}"\nsha256 = "{digest}"\n'.encode())
    write(folder / SECRET, f"{secrets.token_hex(32)}\n".encode())


class Authority:
    """Signs the certificates of one installation."""

    def __init__(self, certificate: bytes, key: bytes):
        """Load an authority from PEM. Raises ValueError."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        self.certificate, self.key = certificate, key
        self._issuer = x509.load_pem_x509_certificate(certificate)
        self._signer = serialization.load_pem_private_key(key, None)
        self.until = self._issuer.not_valid_after_utc

    @classmethod
    def read(cls, folder: Path) -> Authority:
        """Read the authority of a folder. Raises OSError, ValueError."""
        try:
            found = cls((folder / CA_CERT).read_bytes(), (folder / CA_KEY).read_bytes())
        except TypeError:  # cryptography asks for a password
            raise ValueError(f"{folder / CA_KEY} is encrypted: decrypt it first, with openssl pkey") from None
        if found.until < _in_days(0):
            raise ValueError(
                f"{folder / CA_CERT} ended on {found.until:%Y-%m-%d}: make a new authority, without --renew"
            )
        return found

    @classmethod
    def make(cls, days: int) -> Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key, name = ec.generate_private_key(ec.SECP256R1()), _name(f"Baton authority {secrets.token_hex(4)}")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(name, name, key, _in_days(days))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        return cls(*_signed(builder, key, key))

    def issue(self, role: str, names: Iterable[str], days: int) -> tuple[bytes, bytes]:
        """Return (certificate, key) in PEM for DNS names and IP addresses, for servers and clients. The certificate
        ends no later than the authority's."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID as Use

        key = ec.generate_private_key(ec.SECP256R1())
        until = min(_in_days(days), self.until)
        builder = _builder(_name(f"baton {role}"), self._issuer.subject, key, until)
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([Use.SERVER_AUTH, Use.CLIENT_AUTH]), False),
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._signer.public_key()), False),  # pyright: ignore[reportArgumentType]
        ):
            builder = builder.add_extension(extension, critical=critical)
        return _signed(builder, key, self._signer)


def write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _in_days(days: int) -> datetime.datetime:
    """Return the time in so many days. Raises OverflowError."""
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)


def _builder(subject, issuer, key, until: datetime.datetime):
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_in_days(0) - datetime.timedelta(minutes=5))
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(builder, key, signer) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    certificate = builder.sign(signer, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), pem


def _usage(**given: bool):
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
             "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")  # fmt: skip
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})


def _name(common_name: str):
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _names_in(path: Path) -> list[str]:
    """Return the DNS names and IP addresses of a certificate; empty if the file does not exist. Raises OSError,
    ValueError."""
    from cryptography import x509

    if not path.exists():
        return []
    extensions = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name) for kind in (x509.DNSName, x509.IPAddress) for name in names.get_values_for_type(kind)]


def _is_host(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return bool(_HOST_NAME.fullmatch(text))


def _general_name(name: str):
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
