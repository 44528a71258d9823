"""A process of HTTP clients for bench/doors.py: python -m bench.processes.http_client TARGET NUMBER SECONDS OUTPUT.

NUMBER streams of /v1/completions at once, each on a connection that it keeps. Prints one JSON object.
"""

import asyncio
import json
import random
import sys
import time

import uvloop

from bench.processes.gateway_client import PROMPT, Seen


async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict, seen: Seen) -> None:
    """One request, read to its end."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    begun = time.monotonic()
    writer.write(head.encode() + b"\r\n\r\n" + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        seen.failed.append(answer.split(b"\r\n")[0].decode())
        return
    is_first = True
    while size := int(await reader.readline(), 16):
        events = await reader.readexactly(size + 2)
        if is_first:
            seen.ttft_s.append(time.monotonic() - begun)
            is_first = False
        for event in events.split(b"\n\n"):
            if event.startswith(b"data: {"):
                seen.num_messages += 1
                seen.num_tokens += sum(len(each["token_ids"]) for each in json.loads(event[6:])["choices"])
    await reader.readline()


async def main(target: str, number: str, seconds: str, output: str) -> None:
    seen, rng, until = Seen(), random.Random(0), time.monotonic() + float(seconds)
    host, _, port = target.rpartition(":")

    async def work() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while time.monotonic() < until and not seen.failed:
            body = {
                "prompt": [rng.randrange(5, 4096) for _ in range(PROMPT)],
                "max_tokens": int(output),
                "stream": True,
            }
            await stream(reader, writer, {**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True}, seen)
        writer.close()

    await asyncio.gather(*(work() for _ in range(int(number))))
    print(json.dumps({"ttft_s": seen.ttft_s, "num_messages": seen.num_messages, "num_tokens": seen.num_tokens,
                      "failed": seen.failed}), flush=True)  # fmt: skip


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(*sys.argv[1:]))
