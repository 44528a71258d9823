"""Copies of the code in docs/ are equal to it."""

import re
from pathlib import Path

import pytest

from baton.engine.schedule.lifecycle import TABLE as ENGINE_TABLE
from baton.engine.schedule.states import GroupEvent, GroupState
from baton.worker.legs.states import LegEvent, LegState
from gateway.orchestration.states import RequestEvent
from gateway.orchestration.timeouts import TIMEOUTS
from gateway.orchestration.transitions import TABLE as GATEWAY_TABLE
from gateway.request.request_state import RequestState
from tests.support.process import ROOT
from tests.support.source_tree import folder_map
from tests.support.state_table import state_table_markdown, timeout_table_markdown
from tests.support.worker.fakes import TABLE as WORKER_TABLE


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("worker states", (LegState, LegEvent, WORKER_TABLE, lambda cell: (cell.state, *cell.others))),
        ("gateway states", (RequestState, RequestEvent, GATEWAY_TABLE, lambda cell: cell.states)),
        ("engine states", (GroupState, GroupEvent, ENGINE_TABLE)),
    ],
)
def test_state_tables(name, table):
    text = (ROOT / "docs" / "states.md").read_text()
    (drawn,) = re.findall(f"<!-- {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    assert drawn.strip() == state_table_markdown(*table).strip()


def test_timeouts():
    (drawn,) = re.findall(
        r"<!-- gateway timeouts -->\n(.*?)\n<!-- end -->", (ROOT / "docs" / "states.md").read_text(), re.DOTALL
    )
    assert drawn.strip() == timeout_table_markdown(TIMEOUTS).strip()


PAGES = [*ROOT.glob("*.md"), ROOT / "demo" / "README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_docs_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith("http"):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the names that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
            waiting += [(page.parent / link).resolve() for link in links]
    assert not set(PAGES) - reached


@pytest.mark.parametrize(
    "page, most", [("README.md", 150), ("docs/architecture.md", 155)]
)  # the map has a line a folder
def test_a_page_for_everybody_is_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_every_folder_is_drawn():
    """A line for each folder, below its room: what its `__init__` says."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (drawn,) = re.findall(r"<!-- folders -->\n```\n(.*?)```\n<!-- end -->", text, re.DOTALL)
    assert drawn == folder_map(ROOT)


# What CHANGELOG.md and the table of faults are ordered by, in this order.
AREAS = (
    "Gateway",
    "Workers and KV",
    "Engine and models",
    "Commands",
    "HTTP",
    "Observability",
    "Containers and Kubernetes",
    "Client libraries",
)
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def is_ordered(headings: list[str], known: tuple[str, ...]) -> bool:
    """Return whether headings are known ones, each once, in the order of those."""
    return [name for name in known if name in headings] == headings


def test_the_changelog_says_each_change_in_two_lines_below_its_area():
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    for release in releases:
        version, *kinds = re.split(r"^### ", release, flags=re.MULTILINE)
        assert "\n- " not in version, "an entry stands below its kind"
        assert is_ordered([kind.partition("\n")[0] for kind in kinds], KINDS)
        for kind in kinds:
            head, *areas = re.split(r"^#### ", kind, flags=re.MULTILINE)
            assert "\n- " not in head, "an entry stands below its area"
            assert is_ordered([area.partition("\n")[0] for area in areas], AREAS)
        for entry in re.findall(r"^- .*(?:\n(?!- |#|$).*)*", release, re.MULTILINE):
            lines = entry.splitlines()
            assert len(lines) <= 2 and max(map(len, lines)) <= 160, f"two lines of 160 characters: {entry}"


def rows_of(table: str) -> list[str]:
    """Return the rows of one or more tables below each other, without their heads."""
    return re.findall(r"^\| (?!fault \|).*$", table, re.MULTILINE)


@pytest.mark.parametrize("page", ["security.md", "faults.md"])
def test_what_proves_a_fault_closed_is_there(page):
    (table,) = re.findall("<!-- closed -->\n(.*?)\n<!-- end -->", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert is_ordered(re.findall(r"^### (.*)$", table, re.MULTILINE), AREAS)
    for row in rows_of(table):
        proofs = re.findall(r"`((?:tests/|::)[^`]*)`", row)
        assert len(proofs) == 1, f"one test a row: {row}"
        path, _, name = proofs[0].partition("::")
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{page} names {proofs[0]}"


def test_a_fault_is_told_briefly():
    (table,) = re.findall("<!-- closed -->\n(.*?)\n<!-- end -->", (ROOT / "docs" / "faults.md").read_text(), re.DOTALL)
    assert "\n### " in table
    for row in rows_of(table):
        _, fault, mending, _, _ = re.split(r"(?<!\\)\|", row)
        assert len(fault.strip()) <= 160 and len(mending.strip()) <= 80, (
            f"160 characters for a fault, 80 for what was done: {row}"
        )
