"""The site: it builds without a link that leads nowhere, its reference has what the code has, every error is told."""

import ast
import html
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import grpc
import pytest

from baton import protocol
from baton.cli.main import COMMANDS
from baton.service import errors
from baton.service.settings import flat_fields, make_parser
from baton.v1 import fleet_pb2, inference_pb2, kv_pb2, worker_pb2
from baton.worker.settings import WorkerSettings
from gateway.config.settings import GatewaySettings
from tests.support.process import ROOT

_SOURCES = [path for top in ("gateway", "baton/service", "baton/worker") for path in (ROOT / top).rglob("*.py")]
_ASSIGNED = re.compile(r"\breason\b|_KV_ERRORS")
_REASON = re.compile(r"[A-Z]+(_[A-Z]+)*")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "COLUMNS": "80"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def words(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_the_reference_has_what_the_code_has(site):
    commands, settings, calls = (
        words(site / "reference" / name / "index.html") for name in ("commands", "settings", "calls")
    )
    assert all(f"usage: baton {name}" in commands for name in COMMANDS)
    for cls in (GatewaySettings, WorkerSettings):
        for name in flat_fields(cls):
            assert f"--{name.replace('_', '-')}" in settings and f"BATON_{name.upper()}" in settings
    methods = [
        name for path in (ROOT / "protos").rglob("*.proto") for name in re.findall(r"rpc (\w+)", path.read_text())
    ]
    assert len(methods) > 8 and all(name in calls for name in methods)


@pytest.mark.parametrize("service", [
    service
    for file in (inference_pb2, fleet_pb2, worker_pb2, kv_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
], ids=lambda service: service.name)  # fmt: skip
def test_each_call_has_a_page_with_every_field_and_comment(site, service):
    for method in service.methods:
        page = html.unescape(words(site / "reference" / "calls" / f"{service.name}.{method.name}" / "index.html"))
        missing = {name for name in fields_of(method.input_type, method.output_type) if name not in page}
        assert not missing and len(page.split(method.name)[1]) > 20, f"{method.name}: no word about it"
    if service.name == "Inference":
        page = " ".join(html.unescape(words(site / "reference/calls/Inference.Generate/index.html")).split())
        contract = (ROOT / "protos/baton/v1/inference.proto").read_text()
        for said in (
            "Half a UTF-8 character",
            "drawn by the gateway and returned",
            "one of input",
            "Needs the seed that",
        ):
            assert said in page and said in f"one of input {contract}"


def fields_of(*types) -> set[str]:
    """The names of fields and of enums' values, of messages and all that they hold."""
    found, seen, waiting = set(), set(), [*types]
    while waiting:
        message = waiting.pop()
        if message.full_name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            found.add(field.name)
            waiting += [field.message_type] if field.message_type else []
            found |= {value.name for value in field.enum_type.values} if field.enum_type else set()
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name):
    subparsers = make_parser("baton", "").add_subparsers()
    import_module(f"baton.cli.{COMMANDS[name]}").add_parser(subparsers)
    parser = subparsers.choices[name]
    assert parser.description and len(parser.description) > 30 and not parser.allow_abbrev


def test_pages_load_nothing_from_elsewhere(site):
    for page in ("index.html", "reference/settings/index.html"):
        assert not re.search(r'(src|<link [^>]*href)="?(https?:)?//', (site / page).read_text())


def test_files_beside_the_pages_are_pages(site):
    assert "message GenerateRequest" in words(site / "source/protos/baton/v1/inference.proto/index.html")
    assert "Set up and check" in words(site / "source/CONTRIBUTING/index.html")


def reasons() -> set[str]:
    """All that errors are given: `reason="X"`, `code, reason = ..., "X"`, `X = "X"`, Status(..., "X"), BadCall(...,
    "X"), rows of tables of these."""
    found = set()
    for path in _SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.keyword) and node.arg == "reason"
            if named or (isinstance(node, ast.Assign) and _ASSIGNED.search(ast.unparse(node.targets[0]))):
                found |= _constants(node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):  # X = "X"
                found |= _constants(node.value) & {ast.unparse(node.targets[0])}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Status", "BadCall"):
                found |= {each for argument in node.args for each in _constants(argument)}
    return found


def _constants(node: ast.AST) -> set[str]:
    values = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    shared = [
        each for each in ast.walk(node) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "protocol"
    ]
    values |= {getattr(protocol, each.attr) for each in shared}
    return {value for value in values if _REASON.fullmatch(value)}


def reasons_table() -> list[str]:
    (table,) = re.findall("<!-- reasons -->\n(.*?)<!-- end -->", (ROOT / "docs/errors.md").read_text(), re.DOTALL)
    return table.splitlines()


def statuses() -> dict[str, set[str]]:
    """The statuses of reasons: of the classes of errors, and of what stands beside one in a call or a tuple, as in
    `Overloaded(..., reason="X")` and `Status(code, "X")`."""
    kinds = {name: kind for name, kind in vars(errors).items() if hasattr(kind, "reason")}
    found = defaultdict[str, set[str]](set)
    for kind in kinds.values():
        found[kind.reason].add(kind.code.name)
    for node in (node for path in _SOURCES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Tuple):
            parts = node.elts
        elif isinstance(node, ast.Call):
            parts = [*node.args, *(each.value for each in node.keywords)]
        else:
            continue
        codes = {each.attr for each in parts if isinstance(each, ast.Attribute)} & {
            code.name for code in grpc.StatusCode
        }
        if not codes and isinstance(node, ast.Call) and (kind := kinds.get(ast.unparse(node.func))):
            codes = {kind.code.name}
        for each in parts:
            if len(codes) == 1 and not isinstance(each, ast.Call | ast.Tuple):
                for reason in _constants(each):
                    found[reason] |= codes
    return found


def test_every_error_is_told_with_its_status():
    rows = [row.split("|") for row in reasons_table()[2:]]
    told = {reason: row[2].strip() for row in rows for reason in re.findall(r"`([A-Z_]+)`", row[1])}
    told = {reason: set(status.split(", ")) for reason, status in told.items() if status != "-"}
    by_variables = {"DECODE_WORKER_LOST", "PREFILL_WORKER_LOST", "STALLED", "ENGINE_FAILED", "STEP_FAILED"}
    seen, found = told.keys() - by_variables, statuses()
    assert len(seen) > 30 and {reason: found[reason] for reason in seen} == {reason: told[reason] for reason in seen}


def test_every_error_is_told_with_what_to_do():
    told = {each for row in reasons_table() for each in re.findall(r"`([A-Z_]+)`", row.split("|")[1])}
    refusals = set(re.findall(r"^\| (.*?) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE))
    told |= {each for cell in refusals for each in re.findall(r"`([A-Z_]+)`", cell)}
    lost = {"DECODE_WORKER_LOST", "PREFILL_WORKER_LOST"}  # put together from the role
    assert not (reasons() | lost) - told
    assert not told - reasons() - lost
