"""The help of each command: one screen, with examples that the command takes."""

import argparse
import re
import shlex
from importlib import import_module

import pytest

from baton.cli.cluster.certs import API_KEY, CA_CERT, NAMES
from baton.cli.main import COMMANDS, main
from baton.cli.models.quantize import SCHEMES

ONE_SCREEN = 56  # rows of 80 columns
WRITTEN = {f"certs/{name}" for name in (API_KEY, CA_CERT)} | {  # by `baton certs --out certs`
    f"certs/{role}.{end}" for role in NAMES for end in ("crt", "key")
}


def help_of(name: str, capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    return capsys.readouterr().out


def commands_in(line: str) -> list[list[str]]:
    """The arguments of each `baton` command of a line of a shell."""
    found = []
    for part in re.split(r"\s(?:\||&&)\s", re.sub(r"\s> \S+", "", line)):
        words = shlex.split(part.split("  ")[0])  # what it does may stand behind two spaces
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[0] == "baton":
            found.append(words[1:])
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_one_screen_and_ends_with_examples_that_parse(name, capsys, monkeypatch):
    rows = help_of(name, capsys, monkeypatch).rstrip().splitlines()
    assert len(rows) <= ONE_SCREEN
    examples = rows[rows.index("examples:") + 1 :]
    argvs = [argv for line in examples for argv in commands_in(line.strip())]
    assert name in {argv[0] for argv in argvs}
    parser = argparse.ArgumentParser(exit_on_error=False)
    subparsers = parser.add_subparsers(required=True)
    for module in COMMANDS.values():
        import_module(f"baton.cli.{module}").add_parser(subparsers)
    for argv in argvs:
        args = parser.parse_args(argv)
        assert args.run and getattr(args, "scheme", "fp8") in SCHEMES
        assert {word for word in argv if word.startswith("certs/")} <= WRITTEN


def test_commands_are_found_in_a_line_of_a_shell():
    assert commands_in('git diff | baton generate "a b" -n 2') == [["generate", "a b", "-n", "2"]]
    assert commands_in("X=1 baton config > f && baton up --config f") == [["config"], ["up", "--config", "f"]]
    assert commands_in("baton up    serve") == [["up"]]
