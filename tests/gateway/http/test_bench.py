"""`baton bench --openai` against the gateway's own OpenAI API: the page that compares it with others."""

import asyncio
import json

from baton.cli.main import main


async def test_bench_over_http(served, tmp_path):
    async with served() as (c, _):
        url, out = f"http://127.0.0.1:{c.gateway.http.port}/v1", tmp_path / "run"
        load = ("--closed", "2", "--num-requests", "6", "--prompt-tokens", "16", "--output-tokens", "4")
        assert await asyncio.to_thread(main, ["bench", "--openai", url, *load, "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["statuses"] == {"OK": 6} and summary["output_tokens_per_s"] > 0
