"""A process of HTTP clients for bench/http_api.py: python -m bench.processes.http_client TARGET NUMBER SECONDS OUTPUT.

NUMBER concurrent streams of /v1/completions, each on a kept connection, like those of gateway_client's `closed`. Prints
one JSON object with the same fields."""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict

import uvloop

from bench.processes.gateway_client import PROMPT, Seen, closed_loop


async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict, seen: Seen) -> None:
    """Send one request, and read its answer to the end. One that lacks tokens has failed."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    begun = time.monotonic()
    writer.write(head.encode() + b"\r\n\r\n" + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        seen.failed.append(answer.split(b"\r\n")[0].decode())
        return
    is_first, num_tokens = True, 0
    while size := int(await reader.readline(), 16):
        events = await reader.readexactly(size + 2)
        at = time.monotonic()
        if is_first:
            seen.ttft_s.append(at - begun)
            is_first = False
        for event in events.split(b"\n\n"):
            if event.startswith(b"data: {"):
                seen.num_messages += 1
                ids = [token_id for each in json.loads(event[6:])["choices"] for token_id in each["token_ids"]]
                num_tokens += len(ids)
                seen.arrivals.extend((token_id, at) for token_id in ids)
    await reader.readline()
    seen.num_tokens += num_tokens
    if num_tokens != body["max_tokens"]:
        seen.failed.append(f"{num_tokens} of {body['max_tokens']} tokens came")


async def main(target: str, number: str, seconds: str, output: str) -> None:
    seen, rng = Seen(), random.Random(0)
    host, _, port = target.rpartition(":")
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(int(number))]

    async def one(place: int, num_tokens: int) -> None:
        ids = [rng.randrange(5, 4096) for _ in range(PROMPT)]
        body = {"prompt": ids, "max_tokens": num_tokens, "stream": True, "temperature": 0}
        await stream(*connections[place], {**body, "ignore_eos": True, "return_token_ids": True}, seen)

    await closed_loop(int(number), float(seconds), int(output), seen, one)
    for _, writer in connections:
        writer.close()
    print(json.dumps(asdict(seen)), flush=True)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(*sys.argv[1:]))
