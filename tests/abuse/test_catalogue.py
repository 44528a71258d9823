"""Nothing is left out: every method of every .proto file has its row, and docs/security.md says what is tried."""

import re
from pathlib import Path

from tests.support.abuse.catalogue import ABUSES, GRPC, PORTS, cells
from tests.support.security.methods import methods

DOCS = Path(__file__).resolve().parents[2] / "docs" / "security.md"


def test_every_method_has_its_row():
    assert {
        method.path for port in PORTS.values() if port.speaks in (GRPC, "") for method in port.methods
    } == methods().keys()


def test_every_port_meets_every_abuse():
    tried = {(cell.port.name, cell.abuse.name) for cell in cells()}
    left_out = {(port.name, abuse.name) for port in PORTS.values() for abuse in ABUSES.values()} - tried
    assert left_out == {
        (port.name, abuse.name)
        for port in PORTS.values()
        for abuse in ABUSES.values()
        if not port.speaks or port.speaks in abuse.not_in
    }


def test_names_are_apart():
    assert len({str(cell) for cell in cells()}) == len(cells())


def test_the_table_in_the_docs():
    (drawn,) = re.findall("<!-- abuses -->\n(.*?)\n<!-- end -->", DOCS.read_text(), re.DOTALL)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in drawn.splitlines()[2:]]
    assert rows == [(abuse.name, abuse.what) for abuse in ABUSES.values()]
