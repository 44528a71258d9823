"""By what a command reaches a server: a file that cannot be read is one line that names it."""

import argparse
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.service.net import probe
from baton.service.security.access import add_access_flags, read_access
from baton.service.settings import SettingsError

NAMES = ("tls-ca", "tls-cert", "tls-key", "api-key-file")


def read(tmp_path: Path, name: str, path: Path) -> None:
    """Read flags of which all but `name` are given a file."""
    (tmp_path / "file").write_text("text")
    parser = argparse.ArgumentParser()
    add_access_flags(parser)
    paths = {**dict.fromkeys(NAMES, tmp_path / "file"), name: path}
    read_access(parser.parse_args([f"--{each}={given}" for each, given in paths.items()]))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, name, tmp_path)
    assert str(raised.value) == f"--{name} {tmp_path}: cannot be read: Is a directory"
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, name, tmp_path / "gone")
    assert str(raised.value) == f"--{name} {tmp_path / 'gone'}: cannot be read: No such file or directory"


@pytest.mark.parametrize(
    "content", [b"", b"[keys.k1]\ntenant = 'main'\n", b"-----BEGIN CERTIFICATE-----\n", b"\xff\xfe"]
)
def test_a_file_without_a_key_is_named(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, "api-key-file", tmp_path / "key")
    assert str(raised.value).startswith(f"--api-key-file {tmp_path / 'key'}: holds no key")


@pytest.mark.parametrize("argv", [["top", "--once"], ["drain", "127.0.0.1:1"], ["scale", "decode=1"], ["doctor"]])
def test_a_command_that_is_given_a_folder_says_so(tmp_path, capsys, argv):
    assert main([*argv, f"--tls-ca={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"baton {argv[0]}: --tls-ca {tmp_path}: cannot be read: Is a directory"


def test_a_health_check_that_is_given_a_folder_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        probe.main([f"--tls-ca={tmp_path}", "127.0.0.1:1"])
    assert raised.value.code == 2 and f"error: --tls-ca {tmp_path}: cannot be read" in capsys.readouterr().err
