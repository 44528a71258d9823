"""Describe a worker to gateways, in each session's Hello and on Describe."""

import hashlib
import secrets
from pathlib import Path

from baton.engine.core.device import device_name
from baton.engine.core.model_errors import ModelError
from baton.engine.engine import Engine
from baton.engine.ranks.spawn import Ranks
from baton.gguf import GGUFError, GGUFHeader, is_gguf
from baton.model_files import why_not_itself
from baton.protocol import (
    ADAPTERS,
    CONSTRAINTS,
    GRANTS_POOLING,
    INSTANCE_BYTES,
    POOLING,
    PREFILL_ON_ADMIT,
    PROMPT_LOGPROBS,
    PROTOCOL,
)
from baton.v1 import worker_pb2 as pb
from baton.worker.kv_endpoints import KVEndpoints
from kvtransfer.transfer.source import SourceIdentity
from kvtransfer.wire import layout_to_proto


def new_identity(engine: Engine) -> SourceIdentity:
    """Return a new identity for this start of a worker: random instance and epoch, with the model and numerics of its
    KV."""
    instance, epoch = secrets.token_bytes(INSTANCE_BYTES), secrets.randbits(64)
    return SourceIdentity(instance, epoch, engine.model_identity, str(engine.numerics_class))


def make_hello(engine: Engine, role: str, identity: SourceIdentity, digest: bytes, kv: KVEndpoints) -> pb.Hello:
    """Return the Hello of a worker whose KV is already served. `digest`: the tokenizer's."""
    endpoints = kv.source.endpoints()
    hello = pb.Hello(
        protocol_min=PROTOCOL,
        protocol_max=PROTOCOL,
        instance=identity.instance,
        epoch=identity.epoch,
        roles=[role],
        model_identity=identity.model_identity,
        tokenizer_digest=digest,
        layout=layout_to_proto(kv.layout),
        numerics_class=identity.numerics_class,
        host_id=kv.host_id,
        kv_token_bytes=-(-kv.layout.block_bytes // engine.config.block_size),
        checkpoint_tokens=engine.config.checkpoint_step if engine.layout.state is not None else 0,
        kv_gives=kv.gives,
        kv_takes=kv.takes,
        features=[
            POOLING,
            GRANTS_POOLING,
            PROMPT_LOGPROBS,
            ADAPTERS,
            PREFILL_ON_ADMIT,
            *([CONSTRAINTS] if engine.grammars is not None else []),
        ],
    )
    if engine.ranks is not None:
        _add_group(hello.group, engine.ranks, engine.config.pipeline_parallel)
    for name, adapter_identity in engine.adapters.listed().items():
        hello.adapters.add(name=name, identity=adapter_identity)
    _add_limits(hello.limits, engine)
    _add_model(hello.model, engine)
    hello.model.transports.extend(endpoint.transport for endpoint in endpoints)
    for endpoint in endpoints:
        hello.endpoints.add(transport=endpoint.transport, address=endpoint.address, host_id=endpoint.host_id)
    return hello


def _add_group(group, ranks: Ranks, num_stages: int) -> None:
    group.num_stages = num_stages
    for where, report, nodes in zip(ranks.places, ranks.reports, ranks.numa_nodes, strict=True):
        group.ranks.add(where=where, weight_bytes=report.num_bytes, numa_nodes=",".join(map(str, nodes)))
    if (sums := ranks.sums) is not None:
        group.sum_row_us, group.sum_bytes_per_s, group.copy_bytes_per_s = sums


def tokenizer_digest(folder: Path) -> bytes:
    """Return the digest of tokenizer.json or of a .gguf file's tokenizer, by which a gateway with another tokenizer is
    found. Raises ModelError."""
    if is_gguf(folder):
        try:
            return GGUFHeader(folder).tokenizer_digest
        except GGUFError as error:
            raise ModelError(str(error)) from None
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model folder")
    path = folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise ModelError(f"{path}: {why_not_itself(path) or error.strerror}") from None


def _add_limits(limits, engine: Engine) -> None:
    config = engine.config
    limits.max_model_len = config.max_model_len
    limits.max_num_seqs = config.max_num_seqs
    limits.max_num_batched_tokens = config.max_num_batched_tokens
    limits.num_blocks = engine.num_blocks
    limits.block_size = config.block_size
    limits.model_context = engine.spec.context


def _add_model(model, engine: Engine) -> None:
    config = engine.config
    model.name = engine.model_name
    model.family = engine.spec.family
    model.context = config.max_model_len
    model.vocab_size = engine.spec.vocab_size
    model.dtype = config.dtype
    model.quantization = "none" if engine.weight_form == config.dtype else engine.weight_form
    model.kv_dtype = config.kv_dtype
    model.attention = engine.attention_name
    model.linear = engine.runner.model.head.name
    model.speculator = config.speculator
    model.proposers.extend(engine.speculator.proposers)
    model.prefix_cache = True
    model.device = device_name(engine.pool.device)
    model.hidden_size = engine.spec.hidden_size
