"""Embeddings of a real stack: the same bits alone, in a batch and beside answers, by every door."""

import asyncio

import torch
from transformers import AutoModel

from baton.client import AsyncClient, Client
from baton.v1 import inference_pb2 as pb

TEXTS = ["def quick_brown_fox(self):", "a lazy dog " * 60, "x"]


def vectors(response: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in response.embeddings]


def test_as_transformers_and_the_same_bits_by_both_clients(stack, model):
    theirs = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with Client(stack.target) as client:
        whole = client.embed(TEXTS, pooling=pb.POOLING_MEAN, timeout_s=60)
        assert vectors(whole) == [
            vectors(client.embed([text], pooling=pb.POOLING_MEAN, timeout_s=60))[0] for text in TEXTS
        ]
        assert whole.usage.prompt_tokens == sum(len(client.tokenize(text)) for text in TEXTS)
        for text, ours in zip(TEXTS, vectors(whole), strict=True):
            with torch.inference_mode():
                rows = theirs(torch.tensor([client.tokenize(text)])).last_hidden_state[0]
            mean = rows.mean(dim=0) / rows.mean(dim=0).norm()
            assert torch.dot(mean, torch.tensor(ours)) > 0.999  # bf16

    async def asynchronously() -> pb.EmbedResponse:
        async with AsyncClient(stack.target) as client:
            found, _ = await asyncio.gather(
                client.embed(TEXTS, pooling=pb.POOLING_MEAN, timeout_s=60),
                client.generate("a lazy dog", max_tokens=40, timeout_s=60),
            )
            return found

    assert vectors(asyncio.run(asynchronously())) == vectors(whole)
