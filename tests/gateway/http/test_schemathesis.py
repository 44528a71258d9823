"""Requests made from the OpenAPI document, and others that are unlike it: never a status of 5xx."""

import asyncio
import re
import sys

import pytest

from tests.support.pace import patience


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "phases"),
    [(10, "examples,fuzzing"), pytest.param(100, "examples,coverage,fuzzing", marks=pytest.mark.long)],
)
async def test_no_body_makes_the_gateway_fail(served, caplog, count, phases):
    async with served() as (c, _):
        url = f"http://127.0.0.1:{c.gateway.http.port}/openapi.json"
        argv = [
            "-m", "schemathesis.cli", "run", url, "--checks", "not_a_server_error,status_code_conformance",
            "--max-examples", str(count), "--seed", "1", "--phases", phases, "--no-color",
            "--suppress-health-check", "all",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(patience(200)):
            out, _ = await process.communicate()
        text = out.decode()
        assert process.returncode == 0, text[-6000:]
        assert int(re.search(r"(\d+) generated", text)[1]) > 100, text[-2000:]
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
