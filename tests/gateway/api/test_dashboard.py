"""The page for operators: its policy names its own script and style, links to traces only where it was told to."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from gateway.api.dashboard import pages
from gateway.config.settings import GatewaySettings
from tests.support.process import ROOT

URL = "https://grafana.example/explore?id={trace_id}&orgId=1"


def asked_at(host: str) -> Request:
    return Request({"type": "http", "headers": [(b"host", host.encode())]})


@pytest.mark.parametrize("trace_url", [None, URL])
def test_the_policy_is_of_this_page(trace_url):
    reply = pages(SimpleNamespace(), trace_url)["/"].make(None)
    policy = reply.headers["content-security-policy"]
    page = reply.body.decode()
    for kind in ("script", "style"):
        (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert " style=" not in page and " onclick=" not in page
    assert ("const TRACE_URL = null;" in page) == (trace_url is None) and (trace_url or "null") in page


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)//{trace_id}", "https://x/", 'https://x/{trace_id}"', "{trace_id}"]
)
def test_trace_urls_that_are_none(url):
    with pytest.raises(ValueError, match="--trace-url"):
        GatewaySettings(model=Path("m"), trace_url=url)
    assert GatewaySettings(model=Path("m"), trace_url=URL).trace_url == URL


async def test_the_page_sends_nothing_beyond_loopback_unless_pages_may(cluster):
    """The address of the API is the page's, and in its policy, where both are on loopback or --http-origins is
    given."""
    for settings, is_on in (
        (dict(http="127.0.0.1:0"), True),
        (dict(), False),
        (dict(http="127.0.0.1:0", admin="0.0.0.0:0", open_admin=True), False),
        (dict(http="127.0.0.1:0", admin="0.0.0.0:0", open_admin=True, http_origins=("https://ops.example",)), True),
    ):
        async with cluster(**settings) as c:
            url = c.gateway._api_url("localhost")
            assert url == (f"http://localhost:{c.gateway.http.port}" if is_on else None)
    page = pages(SimpleNamespace(), None, lambda host: f"http://{host}:8000")["/"]
    reply = page.make(page.form(asked_at("localhost:9464")))
    assert b'const API_URL = "http://localhost:8000";' in reply.body
    assert "connect-src 'self' http://localhost:8000;" in reply.headers["content-security-policy"]


def test_the_page_is_read_as_utf8_whatever_the_locale():
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    read = "from gateway.api.dashboard import pages; pages(None)"
    subprocess.run([sys.executable, "-c", read], cwd=ROOT, env=os.environ | plain, check=True)
