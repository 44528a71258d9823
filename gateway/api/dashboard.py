"""Serve a page for operators without Grafana: what the fleet does now, in four small views, and where recent requests
spent their time. The page is one HTML file that asks this gateway for JSON every second."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from baton.service.net.admin import Page, json_response
from baton.service.net.host_names import without_port
from baton.service.observe.phases import COLORS
from baton.v1 import fleet_pb2 as pb
from gateway.api.fleet_service import FleetService

_PAGE = Path(__file__).with_name("dashboard.html")
_PHASES_HERE = "{/*phases*/}"  # in the page, which draws phases in the same colours as the report
_TRACE_URL_HERE = "null/*trace url*/"
_API_URL_HERE = "null/*api url*/"
_NUM_RECENT = 300


def pages(
    fleet: FleetService, trace_url: str | None = None, api_url: Callable[[str], str | None] = lambda host: None
) -> dict[str, Page]:
    """Return the pages by path, for the admin server. `trace_url`: the address of a trace, with {trace_id} in it.
    `api_url(host)`: where a page that was loaded from this host may send completions; None: nowhere."""

    def state(form: None) -> Response:
        requests = fleet.requests(pb.ListRequestsRequest(max_recent=_NUM_RECENT))
        return json_response({"workers": _plain(fleet.workers()), "requests": _plain(requests)})

    template = _PAGE.read_text(encoding="utf-8").replace(_PHASES_HERE, json.dumps(COLORS))
    template = template.replace(_TRACE_URL_HERE, json.dumps(trace_url))

    def page(api: str | None) -> Response:
        shown = template.replace(_API_URL_HERE, json.dumps(api))
        return HTMLResponse(shown, headers={"Content-Security-Policy": _policy(shown, api)})

    def api_of(request: Request) -> str | None:
        return api_url(without_port(request.headers.get("host", "")))

    return {"/": Page(page, form=api_of), "/fleet.json": Page(state)}


def _policy(page: str, api: str | None) -> str:
    """Return the Content-Security-Policy by which a browser uses the page's own script and style, and none that was
    injected."""
    sources = {kind: _digest(page, kind) for kind in ("script", "style")}
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        f"connect-src 'self'{f' {api}' if api else ''}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(page: str, kind: str) -> str:
    (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def _plain(message) -> dict:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
