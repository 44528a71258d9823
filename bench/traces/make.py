"""Make the small synthetic traces of this folder: `python bench/traces/make.py`. The output is always the same.

conversation.jsonl (Mooncake's format): conversations of several turns over a few system prompts. Each turn's prompt is
the previous one with the answer and the next question added, so prefixes are shared as in a chat service. arrivals.csv
(Azure's format): long prompts and short answers in bursts, sharing nothing."""

import csv
import datetime
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
BLOCK = 512  # tokens per hash id
NUM_CONVERSATIONS, NUM_SYSTEM_PROMPTS = 220, 6
NUM_ARRIVALS = 1500
START = datetime.datetime(2024, 1, 1, 9)


def conversations(rng: random.Random) -> list[dict]:
    """Return the requests of all conversations, in order of time."""
    next_id = iter(range(1_000_000))
    systems = [[next(next_id) for _ in range(rng.randint(1, 4))] for _ in range(NUM_SYSTEM_PROMPTS)]
    requests = []
    for _ in range(NUM_CONVERSATIONS):
        at_ms = rng.uniform(0, 1_200_000)
        blocks = list(rng.choices(systems, weights=[2.0**-i for i in range(len(systems))])[0])
        length = len(blocks) * BLOCK
        for _ in range(min(12, 1 + int(rng.expovariate(0.35)))):
            length += int(rng.lognormvariate(5.5, 1.0)) + 8
            while len(blocks) * BLOCK < length:
                blocks.append(next(next_id))
            output = max(4, min(1500, int(rng.lognormvariate(5.0, 0.9))))
            requests.append(
                {"timestamp": int(at_ms), "input_length": length, "output_length": output, "hash_ids": list(blocks)}
            )
            length += output
            at_ms += 1000 * (3 + rng.expovariate(1 / 25)) + 20 * output
    return sorted(requests, key=lambda request: request["timestamp"])


def arrivals(rng: random.Random) -> list[tuple[str, int, int]]:
    """Return (time, prompt tokens, output tokens) of each request, in occasional bursts."""
    rows, at_s = [], 0.0
    while len(rows) < NUM_ARRIVALS:
        at_s += rng.expovariate(1 / 2.0)
        for _ in range(1 if rng.random() < 0.9 else rng.randint(4, 30)):
            at = START + datetime.timedelta(seconds=at_s + rng.random() * 0.3)
            prompt = max(16, min(7800, int(rng.lognormvariate(7.3, 0.9))))
            rows.append((at.isoformat(" ", "microseconds") + "0", prompt, max(1, int(rng.lognormvariate(2.6, 0.9)))))
    return sorted(rows)[:NUM_ARRIVALS]


def main() -> None:
    rng = random.Random(2024)
    with open(FOLDER / "conversation.jsonl", "w") as file:
        for request in conversations(rng):
            file.write(json.dumps(request) + "\n")
    with open(FOLDER / "arrivals.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        writer.writerows(arrivals(rng))


if __name__ == "__main__":
    main()
