"""Prefill and decode on two engines of one process: python examples/two_workers_in_process.py [MODEL_FOLDER].

As two workers do it, but without gRPC: the decode engine gives credit and sets blocks aside, the prefill engine reads
the prompt, and the KV goes from pool to pool under a lease, with digests, while it is computed."""

import asyncio
import sys
from pathlib import Path

from tokenizers import Tokenizer

from baton.engine.core.config import EngineConfig
from baton.engine.core.request import Key, PrefillDone, Progress, Request, RequestEnded, TokenRun
from baton.engine.engine import Engine
from baton.sampling_params import SamplingParams
from baton.worker.kv.intake import EngineBlocks
from kvtransfer.layout import PromptKV
from kvtransfer.memory.region import Region
from kvtransfer.naming import chain_hashes, root_hash
from kvtransfer.transfer.fetcher import Fetcher
from kvtransfer.transfer.local_pool import LocalPool
from kvtransfer.transfer.source import Source, SourceIdentity

PROMPT = "def read_lines(path):\n    " * 12
TRANSPORTS = ("inproc",)


def load(model: str) -> tuple[Engine, Region]:
    """Return an engine and the memory of its pool."""
    regions: list[Region] = []

    def allocate(num_bytes: int) -> Region:
        regions.append(Region.create(num_bytes))
        return regions[0]

    engine = Engine.load(EngineConfig(model=Path(model), num_blocks=64, device="cpu"), memory_for=allocate)
    return engine, regions[0]


async def answer(prefill: Engine, source: Source, decode: Engine, fetcher: Fetcher, request: Request) -> list[int]:
    """Return the answer's token ids. The prompt is read by `prefill`, all tokens but the first are written by
    `decode`."""
    num_cached = decode.admission.admit(request)  # credit: from here on the decode engine has room for it
    accepted = prefill.admission.accept(request)
    prompt = PromptKV(len(request.token_ids), accepted.blocks, request.span_hashes, request.chain_parent)
    offer = source.offer(request.key, prompt, fetcher.taker())
    blocks = EngineBlocks(decode, request.key, num_cached, lambda token: None)
    fetch = asyncio.create_task(fetcher.fetch(offer.handle, offer.ticket, blocks, deadline=float("inf")))
    first_tokens = ()
    while not first_tokens:
        for output in prefill.step():
            match output:
                case Progress():
                    source.advance(output.key, output.upto_token, output.upto_layer)
                case PrefillDone():
                    first_tokens = output.first_tokens
        await asyncio.sleep(0)  # the transfer continues between two steps
    source.advance(request.key, len(request.token_ids))
    report = await fetch
    print(f"{report.num_tokens} tokens of KV, {report.num_bytes >> 10} KiB, by {report.transport}")
    decode.admission.fetch_settled(request.key)
    decode.admission.start(request.key, first_tokens)
    ids = [first_tokens[0].token_id]
    while True:
        for output in decode.step():
            match output:
                case TokenRun():
                    ids += output.token_ids
                case RequestEnded():
                    return ids


async def main(model: str = str(Path(__file__).parents[1] / "demo" / "target")) -> None:
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    (prefill, its_memory), (decode, memory) = load(model), load(model)
    identity = SourceIdentity(b"prefill", 1, prefill.model_identity, str(prefill.numerics_class))
    source = Source(
        LocalPool.of(its_memory.memory, prefill.layout, region=its_memory), identity, "this host",
        lambda key, ending: prefill.admission.release_lease(key),
        generations=prefill.ledger.generation, transports=TRANSPORTS,
    )  # fmt: skip
    pool, numerics = LocalPool.of(memory.memory, decode.layout), str(decode.numerics_class)
    fetcher = Fetcher(pool, b"decode", 2, "this host", TRANSPORTS, numerics_class=numerics)
    await source.start()
    try:
        ids = tuple(tokenizer.encode(PROMPT, add_special_tokens=False).ids)
        root = root_hash(prefill.model_identity)
        hashes = tuple(chain_hashes(root, ids))
        request = Request(
            Key("one"), ids, len(ids), SamplingParams(temperature=0), max_tokens=24,
            span_hashes=hashes, chain_parent=hashes[-1] if hashes else root,
        )  # fmt: skip
        answered = await answer(prefill, source, decode, fetcher, request)
        print(PROMPT + tokenizer.decode(answered))
        print(f"token ids: {answered}")
    finally:
        await source.stop()
        fetcher.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
