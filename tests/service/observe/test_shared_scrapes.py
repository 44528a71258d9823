"""Scrapes that come together share one text."""

import asyncio

from starlette.requests import Request

from baton.service.observe.metrics import Gauge, Metrics


def asked(accept: str = "") -> Request:
    return Request({"type": "http", "headers": [(b"accept", accept.encode())]})


async def test_ten_thousand_scrapes_at_once_are_one_reading():
    """Each had a text of its own, and a gateway had no time for anything else for minutes."""
    readings = []
    metrics = Metrics("m")
    metrics.collect(Gauge("baton_x", "x", lambda: readings.append(None) or len(readings)))
    readings.clear()
    pages = await asyncio.gather(*(metrics.page(asked()) for _ in range(10_000)))
    assert len(readings) == 1 and {page.body for page in pages} == {metrics.exposition().body.replace(b" 2.0", b" 1.0")}


async def test_a_scrape_tells_what_was_when_it_came_or_later():
    value = 1
    metrics = Metrics("m")
    metrics.collect(Gauge("baton_x", "x", lambda: value))
    for value in (2, 3):
        assert f'baton_x{{model_name="m"}} {value}.0' in (await metrics.page(asked())).body.decode()


async def test_a_scrape_that_goes_takes_no_other_with_it():
    metrics = Metrics("m")
    gone, stays = (asyncio.create_task(metrics.page(asked())) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    openmetrics = await metrics.page(asked("application/openmetrics-text"))
    assert (await stays).status_code == 200 and openmetrics.body.endswith(b"# EOF\n")
