"""Dependencies (S14): all of them are declared, with both bounds, from the package index alone; each is imported; and
the installed versions are the declared ones. Known vulnerabilities are looked up in a database, not by a test."""

import ast
import re
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.support.process import ROOT
from tests.support.source_tree import sources

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [Requirement(line) for line in _PROJECT["dependencies"]]
OPTIONAL = [Requirement(line) for extra in _PROJECT["optional-dependencies"].values() for line in extra]
_OURS = {"baton", "gateway", "kvtransfer", "prefill_worker", "decode_worker"}


def imported() -> set[str]:
    """Distributions of all top packages that our sources import, wherever in a file they do."""
    names = set()
    for path in sources().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module)
    owners = metadata.packages_distributions()
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - _OURS
    return {normal(each) for top in tops for each in owners.get(top, ())}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("requirement", DECLARED + OPTIONAL, ids=str)
def test_each_dependency_is_bounded_below_and_above(requirement):
    """A new major version is allowed by a commit, not by its release."""
    assert requirement.url is None
    operators = {each.operator for each in requirement.specifier}
    assert operators == {"=="} or {">=", "<"} <= operators


def test_everything_imported_is_declared():
    declared = {normal(each.name) for each in DECLARED + OPTIONAL}
    # Namespace packages have many owners; one that is declared is enough.
    owners = metadata.packages_distributions()
    shared = {normal(name) for names in owners.values() if len(names) > 1 for name in names}
    assert imported() - declared - shared == set()


def test_everything_declared_is_imported():
    assert {normal(each.name) for each in DECLARED} - imported() == set()


def test_what_is_installed_was_declared():
    for requirement in DECLARED:
        assert requirement.specifier.contains(metadata.version(requirement.name), prereleases=True), requirement
