"""The gateway's page in a real browser, over a real stack."""

import re
import shutil
import subprocess
from urllib.request import urlopen

import pytest

from baton.cli.main import main
from baton.engine.core import cpu
from tests.support.observe.browser import Browser
from tests.support.stack import Stack

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "chromium is missing: install Debian's package chromium"
    return found


def dom(chromium: str, url: str, folder) -> str:
    """The page after four seconds of its own time."""
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    done = subprocess.run(
        [*argv, "--virtual-time-budget=4000", "--dump-dom", url], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_shows_the_fleet(stack, client, prompts, chromium, tmp_path):
    replies = [client.generate(prompts(80), temperature=0.0, max_tokens=6, ignore_eos=True) for _ in range(5)]
    admin = stack.gateways[0].ready()["admin"]
    page = dom(chromium, f"http://{admin}/", tmp_path)
    assert 'class="good"' in page and ">ready<" in page
    for reply in replies:
        assert reply.request_id in page
    for name, process in zip(("prefill", "decode"), stack.workers, strict=True):
        assert f"{name} {stack.address[process.name]}" in page
    assert re.search(r'<p id="bound">Bound by \w+', page)
    assert "TTFT" in page and "TPOT" in page and "6 tokens" in page and "160 blocks" in page
    assert "nothing yet" not in page.split("Running, oldest first")[0]


def test_a_request_is_opened_by_keyboard_and_stays_open(stack, client, prompts, tmp_path):
    """Each phase in a line of its own, with the trace; the page's policy blocks nothing of the page."""
    reply = client.generate(prompts(80), temperature=0.0, max_tokens=6, ignore_eos=True)
    opened = "document.querySelector('.detail')?.innerText || ''"
    with Browser(tmp_path) as browser:
        browser.open(f"http://{stack.gateways[0].ready()['admin']}/")
        browser.until("document.querySelectorAll('button.row').length > 0")
        browser.press("Tab")
        assert browser.run("document.activeElement.innerText").startswith(reply.request_id)
        browser.press("Enter")
        told = browser.until(opened)
        trace = browser.run("document.activeElement.dataset.trace")
        assert len(trace) == 32 and f"trace {trace}" in told
        assert "prefill" in told and "decode" in told and "80 prompt tokens" in told and "6 written" in told
        refreshed = int(browser.run("document.body.dataset.refreshed"))
        browser.until(f"Number(document.body.dataset.refreshed) > {refreshed + 1}")
        assert trace in browser.run(opened) and browser.run("document.activeElement.ariaExpanded") == "true"
        browser.press("Enter")
        browser.until("!document.querySelector('.detail')")
        workers = browser.run("document.getElementById('workers').innerText")
        assert cpu.name() in workers and "MiB" in workers
        assert not browser.complaints


def test_a_completion_streams_into_the_page(model, tmp_path):
    """Where both ports are reached from this host alone; errors of a request are shown there too."""
    http = ("--http", "127.0.0.1:0")
    with (
        Stack(model, tmp_path / "stack", num_prefill=0, gateway_options=http) as stack,
        Browser(tmp_path / "b") as browser,
    ):
        browser.open(f"http://{stack.gateways[0].ready()['admin']}/")
        browser.until("document.body?.dataset.refreshed && !document.getElementById('playground').hidden")
        browser.run("document.getElementById('tokens').value = 8")
        browser.run("document.getElementById('send').focus()")
        browser.press("Enter")
        answer = "document.getElementById('answer').innerText"
        browser.until(f"document.getElementById('stop').disabled && {answer}.length > 3")
        browser.run("document.getElementById('tokens').value = 4096; document.getElementById('send').click()")
        browser.until(f"{answer}.startsWith('400: ')")
        assert not [each for each in browser.complaints if "400" not in each]


def test_no_playground_without_the_http_api(stack, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(f"http://{stack.gateways[0].ready()['admin']}/")
        browser.until("document.body?.dataset.refreshed")
        assert browser.run("document.getElementById('playground').hidden")


def test_what_finds_its_way_into_the_page_does_not_run(stack, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(f"http://{stack.gateways[0].ready()['admin']}/")
        browser.until("document.body?.dataset.refreshed")
        browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
        browser.run(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 2'}))"
        )
        browser.until("true")
        assert browser.run("document.title") == "Baton" and any(
            "Content Security" in each for each in browser.complaints
        )


def test_the_page_needs_nothing_from_elsewhere(stack):
    admin = stack.gateways[0].ready()["admin"]
    text = urlopen(f"http://{admin}/", timeout=10).read().decode()
    assert "http://" not in text and "https://" not in text and "src=" not in text


def test_a_report_in_a_browser(stack, chromium, tmp_path):
    out = tmp_path / "run"
    main(["bench", "--target", stack.target, "--rate", "20", "--num-requests", "20", "--prompt-tokens", "64",
          "--output-tokens", "8", "--out", str(out)])  # fmt: skip
    page = dom(chromium, (out / "report.html").as_uri(), tmp_path / "profile")
    assert page.count("<svg") >= 4 and "20 of 20 answered" in page


def test_top_sees_the_same(stack, client, prompts, capsys):
    client.generate(prompts(40), temperature=0.0, max_tokens=3)
    assert main(["top", "--target", stack.target, "--once"]) == 0
    said = capsys.readouterr().out
    assert f"decode {stack.address['decode0']}" in said and "TTFT" in said
