"""Send many requests at once over one channel: python examples/many_at_once.py [HOST:PORT].

The gateway refuses what it cannot serve in time and says when to try again; the client waits as long and tries again,
within the call's timeout."""

import asyncio
import sys

from baton.client import AsyncClient, CallError

PROMPTS = [f"def function_{i}(" for i in range(16)]


async def main(target: str = "127.0.0.1:50051") -> None:
    async with AsyncClient(target, timeout_s=60) as client:
        calls = (client.generate(prompt, max_tokens=16) for prompt in PROMPTS)
        try:
            answers = await asyncio.gather(*calls)
        except CallError as error:
            sys.exit(f"{target}: {error}")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        print(repr(prompt + answer.choices[0].text))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
