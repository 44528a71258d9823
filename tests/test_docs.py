"""What docs/ copies from the code is equal to it."""

import re
from functools import partial
from pathlib import Path

import pytest

from baton.worker.session.table import table_markdown
from gateway.orchestration.states import state_table_markdown as gateway_states
from tests.support.folder_map import folder_map
from tests.support.worker.doubles import TABLE

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "table"), [("worker states", partial(table_markdown, TABLE)), ("gateway states", gateway_states)]
)
def test_state_tables(name, table):
    text = (ROOT / "docs" / "states.md").read_text()
    (drawn,) = re.findall(f"<!-- {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert drawn.strip() == table().strip()


def test_links_in_docs_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "demo" / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_folder_is_drawn():
    """A line for each folder, below its room: what its `__init__` says."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (drawn,) = re.findall(r"<!-- folders -->\n```\n(.*?)```\n<!-- end -->", text, re.DOTALL)
    assert drawn == folder_map(ROOT)


@pytest.mark.parametrize("page", ["security.md", "faults.md"])
def test_what_proves_a_fault_closed_is_there(page):
    (table,) = re.findall("<!-- closed -->\n(.*?)\n<!-- end -->", (ROOT / "docs" / page).read_text(), re.DOTALL)
    proofs = re.findall(r"`(tests/[^`]*)`", table)
    assert len(proofs) == len(table.splitlines()) - 2, "one test a row"
    for proof in proofs:
        path, _, name = proof.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), f"{page} names {proof}"
