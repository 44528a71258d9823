"""`baton certs`: the files it writes, their permissions, and that nothing is ever written over."""

import errno
import shlex
import shutil
import subprocess
import time
from datetime import datetime, timedelta

import pytest

from baton.cli.cluster import certs
from baton.cli.cluster.certs import NAMES
from baton.cli.main import main as baton
from baton.service.observe.process_gauges import process_gauges
from baton.service.security.credentials import Credentials
from gateway.prefix.cluster_secret import read_secret
from tests.support.security.installation import Installation, install

FILES = {"ca.crt", "ca.key", "credentials.toml", "api-key", "cluster-secret"} | {
    f"{role}.{end}" for role in NAMES for end in ("crt", "key")
}


def test_what_is_written(installation):
    assert {path.name for path in installation.folder.iterdir()} == FILES
    assert installation.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in installation.folder.iterdir()} == {0o600}
    for role in NAMES:
        installation.tls(role).check()
    assert Credentials(installation.folder / "credentials.toml").tenant(installation.api_key) == "acme"
    assert len(read_secret(installation.folder / "cluster-secret")) == 64


@pytest.mark.parametrize("role", NAMES)
@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_another_implementation_believes_them(installation, role, purpose):
    tls = installation.tls(role)
    argv = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", tls.ca, tls.cert]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {f"DNS:{name}" for name in NAMES[role]} <= set(names_in(tls))


def test_nothing_is_written_over(installation, capsys):
    before = {path: path.read_bytes() for path in installation.folder.iterdir()}
    assert baton(["certs", "--out", str(installation.folder)]) == 1
    assert "exists" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in installation.folder.iterdir()} == before


def test_new_certificates_of_the_same_authority(installation, tmp_path):
    renewed = install(tmp_path / "new", "--renew", str(installation.folder))
    assert {path.name for path in renewed.folder.iterdir()} == {"ca.crt"} | {
        f"{role}.{end}" for role in NAMES for end in ("crt", "key")
    }
    assert (renewed.folder / "ca.crt").read_bytes() == (installation.folder / "ca.crt").read_bytes()
    assert (renewed.folder / "decode.crt").read_bytes() != (installation.folder / "decode.crt").read_bytes()


def test_a_process_tells_when_its_certificate_ends(installation, tmp_path):
    """That which it shows: one that took the place of another counts at once, and what is being replaced does not."""
    shutil.copytree(installation.folder, tmp_path / "certs")
    renewed = install(tmp_path / "new", "--renew", str(installation.folder), "--days", "20")
    mine = Installation(tmp_path / "certs")

    def days_left() -> int | None:
        found = {gauge.name: gauge.read() for gauge in process_gauges(tls)}["baton_certificate_not_after_seconds"]
        return None if found is None else round((found - time.time()) / 86400)

    tls = mine.tls("decode")
    assert days_left() == 365
    shutil.copy(renewed.folder / "decode.key", mine.folder)
    assert days_left() == 365
    shutil.copy(renewed.folder / "decode.crt", mine.folder)
    assert days_left() == 20
    tls = Installation(tmp_path / "nowhere").tls("decode")
    assert days_left() is None
    tls = None
    assert days_left() is None


def test_wrong_names_hosts_and_folders_are_refused(tmp_path, capsys):
    for name in ("a b", "default"):
        assert baton(["certs", "--out", str(tmp_path / "x"), "--tenant", name]) == 2
    renewing = ["certs", "--out", str(tmp_path / "x"), "--renew", str(tmp_path / "none")]
    assert baton(renewing) == 1 and baton([*renewing, "--tenant", "a"]) == 2
    assert baton(["certs", "--out", str(tmp_path / "x"), "--host", "ü.example"]) == 2
    for days in ("9999999", "9999999999"):
        assert baton(["certs", "--out", str(tmp_path / "x"), "--days", days]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 7 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("host", ["10.0.0.1:50051", "http://a.example", "a,b", "a b", "", "a.example.", "-a"])
def test_what_is_no_host_gets_no_certificate(tmp_path, capsys, host):
    assert baton(["certs", "--out", str(tmp_path / "x"), f"--host={host}"]) == 2
    assert capsys.readouterr().err == f"baton certs: --host {host}: give a host name or an IP address, without a port\n"


def test_a_full_disk_is_named_by_the_folder(tmp_path, capsys, monkeypatch):
    def fill(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")  # of a write: it names no file

    monkeypatch.setattr(certs, "write", fill)
    assert baton(["certs", "--out", str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == f"baton certs: {tmp_path / 'x'}: No space left on device\n"


def names_in(tls) -> list[str]:
    argv = ["openssl", "x509", "-in", tls.cert, "-noout", "-ext", "subjectAltName"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return text.splitlines()[1].strip().split(", ")


def test_the_command_that_is_printed_has_an_address(tmp_path, capsys):
    assert baton(["certs", "--out", str(tmp_path / "certs"), "--host", "fd77::1"]) == 0
    assert "--target [fd77::1]:50051 " in capsys.readouterr().err


def test_the_commands_that_are_printed_can_be_copied(tmp_path, capsys):
    out = tmp_path / "c 3"
    assert baton(["certs", "--out", str(out)]) == 0
    _, up, generate = map(shlex.split, capsys.readouterr().err.splitlines())
    assert up[2:4] == ["--certs", str(out)]
    assert generate[-4:] == ["--tls-ca", str(out / "ca.crt"), "--api-key-file", str(out / "api-key")]


def test_hosts_of_the_gateway(tmp_path):
    """They stay when certificates are renewed, whose authority may be kept without them."""
    made = install(tmp_path / "certs", "--host", "llm.example.net", "--host", "192.0.2.7", "--host", "*.a.example")
    names = names_in(made.tls("gateway"))
    assert {"DNS:llm.example.net", "IP Address:192.0.2.7"} < set(names)
    renewed = install(tmp_path / "new", "--renew", str(made.folder), "--host", "b.example.net", "--host", "192.0.2.7")
    assert sorted(names_in(renewed.tls("gateway"))) == sorted([*names, "DNS:b.example.net"])
    (made.folder / "gateway.crt").unlink()
    apart = install(tmp_path / "apart", "--renew", str(made.folder))
    assert "DNS:llm.example.net" not in names_in(apart.tls("gateway"))


def test_an_authority_that_is_encrypted(installation, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.mkdir()
    shutil.copy(installation.folder / "ca.crt", kept)
    argv = ["openssl", "pkey", "-in", installation.folder / "ca.key", "-aes256", "-passout", "pass:x"]
    subprocess.run([*argv, "-out", kept / "ca.key"], check=True)
    assert baton(["certs", "--out", str(tmp_path / "x"), "--renew", str(kept)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{kept / 'ca.key'} is encrypted" in line and not (tmp_path / "x").exists()


def end_of(path) -> datetime:
    argv = ["openssl", "x509", "-in", path, "-noout", "-enddate"]
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return datetime.strptime(text.strip(), "notAfter=%b %d %H:%M:%S %Y GMT")


def test_an_authority_outlives_its_certificates(installation, tmp_path, capsys):
    """Else renewing them would be of no use, and say nothing."""
    authority, soon = installation.folder / "ca.crt", datetime.now() + timedelta(days=367)
    assert end_of(installation.folder / "decode.crt") < soon < end_of(authority)
    renewed = install(tmp_path / "new", "--renew", str(installation.folder), "--days", "9000")
    assert end_of(renewed.folder / "decode.crt") == end_of(authority)
    assert f"when {authority} ends" in capsys.readouterr().err


def test_certificates_may_be_valid_as_long_as_a_new_authority(tmp_path, capsys):
    """Which is made a moment before it is asked for how long."""
    made = install(tmp_path / "long", "--days", "4000")
    assert end_of(made.folder / "decode.crt") == end_of(made.folder / "ca.crt")
    assert " ends" not in capsys.readouterr().err


def test_an_authority_that_has_ended(installation, tmp_path, capsys, monkeypatch):
    in_days = certs._in_days
    monkeypatch.setattr(certs, "_in_days", lambda days: in_days(days + 4000))
    assert baton(["certs", "--out", str(tmp_path / "x"), "--renew", str(installation.folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{installation.folder / 'ca.crt'} ended on " in line and not (tmp_path / "x").exists()
