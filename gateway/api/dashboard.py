"""A page for those without Grafana: what the fleet does now, in four small views, and where recent requests spent their
time. One HTML file that asks this gateway for JSON every second."""

import json
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from baton.service.net.admin import Page, Reply, json_reply
from baton.service.observe.phases import COLORS
from baton.v1 import fleet_pb2 as pb
from gateway.api.fleet_service import FleetService

_PAGE = Path(__file__).with_name("dashboard.html")
_PHASES_HERE = "{/*phases*/}"  # in the page, which draws phases in the colours of the report
_NUM_RECENT = 300


def pages(fleet: FleetService) -> dict[str, Page]:
    """Return the pages by path, for the admin server."""

    def state(headers: Mapping[str, str]) -> Reply:
        requests = fleet.requests(pb.ListRequestsRequest(max_recent=_NUM_RECENT))
        return json_reply({"workers": _plain(fleet.workers()), "requests": _plain(requests)})

    page = _PAGE.read_text().replace(_PHASES_HERE, json.dumps(COLORS)).encode()
    return {"/": lambda headers: Reply(page, "text/html; charset=utf-8"), "/fleet.json": state}


def _plain(message) -> dict:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
