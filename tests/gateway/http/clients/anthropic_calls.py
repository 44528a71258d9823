"""The anthropic package's client of a gateway."""

from anthropic import AsyncAnthropic

from tests.support.pace import patience


def anthropic_client(c) -> AsyncAnthropic:
    url = f"http://127.0.0.1:{c.gateway.http.port}"
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=patience(20))
