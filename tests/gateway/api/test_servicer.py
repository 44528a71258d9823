"""The calls of clients, as a server has them."""

import grpc

from baton.v1 import inference_pb2 as pb


async def test_older_grpc_asks_for_generic_handlers_alone(cluster, monkeypatch):
    older = type(grpc.aio.server())
    monkeypatch.setattr(older, "add_registered_method_handlers", lambda self, name, handlers: None)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), stopping=pb.Stopping(max_tokens=3))
    async with cluster() as c:
        streamed = [token_id async for message in c.stub.Generate(request) for token_id in message.token_ids]
        whole = await c.stub.Complete(request)
        tokenized = await c.stub.Tokenize(pb.TokenizeRequest(text="a"))
    assert len(streamed) == 3 and list(whole.choices[0].token_ids) == streamed and tokenized.token_ids
