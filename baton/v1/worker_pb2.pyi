from baton.v1 import inference_pb2 as _inference_pb2
from baton.v1 import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("address", "role")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    address: str
    role: str
    def __init__(self, address: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    def __init__(self, ttl_s: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("next_role", "grace_s", "stay_away")
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    STAY_AWAY_FIELD_NUMBER: _ClassVar[int]
    next_role: str
    grace_s: float
    stay_away: bool
    def __init__(self, next_role: _Optional[str] = ..., grace_s: _Optional[float] = ..., stay_away: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_sequences", "role", "keeper")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KEEPER_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    role: str
    keeper: str
    def __init__(self, num_sequences: _Optional[int] = ..., role: _Optional[str] = ..., keeper: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("identity",)
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    def __init__(self, identity: _Optional[bytes] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Key(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "features", "instance", "epoch", "roles", "model_identity", "tokenizer_digest", "layout", "numerics_class", "limits", "model", "endpoints", "host_id", "wall_time_ns", "kv_gives", "kv_takes", "kv_token_bytes", "checkpoint_tokens", "adapters", "group")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    KV_GIVES_FIELD_NUMBER: _ClassVar[int]
    KV_TAKES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    instance: bytes
    epoch: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    model_identity: bytes
    tokenizer_digest: bytes
    layout: _kv_pb2.KVLayout
    numerics_class: str
    limits: Limits
    model: ModelCard
    endpoints: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Endpoint]
    host_id: str
    wall_time_ns: int
    kv_gives: _containers.RepeatedScalarFieldContainer[str]
    kv_takes: _containers.RepeatedScalarFieldContainer[str]
    kv_token_bytes: int
    checkpoint_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    group: RankGroup
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., instance: _Optional[bytes] = ..., epoch: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., model_identity: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., layout: _Optional[_Union[_kv_pb2.KVLayout, _Mapping]] = ..., numerics_class: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., model: _Optional[_Union[ModelCard, _Mapping]] = ..., endpoints: _Optional[_Iterable[_Union[_kv_pb2.Endpoint, _Mapping]]] = ..., host_id: _Optional[str] = ..., wall_time_ns: _Optional[int] = ..., kv_gives: _Optional[_Iterable[str]] = ..., kv_takes: _Optional[_Iterable[str]] = ..., kv_token_bytes: _Optional[int] = ..., checkpoint_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., group: _Optional[_Union[RankGroup, _Mapping]] = ...) -> None: ...

class RankGroup(_message.Message):
    __slots__ = ("num_stages", "ranks", "sum_row_us", "sum_bytes_per_s", "copy_bytes_per_s")
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SUM_ROW_US_FIELD_NUMBER: _ClassVar[int]
    SUM_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    COPY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_stages: int
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    sum_row_us: float
    sum_bytes_per_s: float
    copy_bytes_per_s: float
    def __init__(self, num_stages: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., sum_row_us: _Optional[float] = ..., sum_bytes_per_s: _Optional[float] = ..., copy_bytes_per_s: _Optional[float] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("where", "weight_bytes", "numa_nodes")
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    where: str
    weight_bytes: int
    numa_nodes: str
    def __init__(self, where: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., numa_nodes: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: bytes
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[bytes] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "block_size", "model_context")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    model_context: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., model_context: _Optional[int] = ...) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "family", "context", "vocab_size", "dtype", "quantization", "kv_dtype", "attention", "transports", "linear", "speculator", "prefix_cache", "proposers", "device", "hidden_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_FIELD_NUMBER: _ClassVar[int]
    SPECULATOR_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    context: int
    vocab_size: int
    dtype: str
    quantization: str
    kv_dtype: str
    attention: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    linear: str
    speculator: str
    prefix_cache: bool
    proposers: _containers.RepeatedScalarFieldContainer[str]
    device: str
    hidden_size: int
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., context: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., attention: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., linear: _Optional[str] = ..., speculator: _Optional[str] = ..., prefix_cache: bool = ..., proposers: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class RequestSpec(_message.Message):
    __slots__ = ("token_ids", "num_prompt_tokens", "span_hashes", "chain_parent", "sampling", "max_tokens", "min_tokens", "stop_token_ids", "priority", "traceparent", "budget_ms", "speculation", "constraint", "tenant_mark", "pooling", "adapter", "fingerprint")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_PARENT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_MARK_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    span_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    chain_parent: bytes
    sampling: WorkerSampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    priority: int
    traceparent: str
    budget_ms: int
    speculation: _inference_pb2.Speculation
    constraint: _inference_pb2.Constraint
    tenant_mark: bytes
    pooling: PoolingSpec
    adapter: bytes
    fingerprint: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., span_hashes: _Optional[_Iterable[bytes]] = ..., chain_parent: _Optional[bytes] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., priority: _Optional[int] = ..., traceparent: _Optional[str] = ..., budget_ms: _Optional[int] = ..., speculation: _Optional[_Union[_inference_pb2.Speculation, _Mapping]] = ..., constraint: _Optional[_Union[_inference_pb2.Constraint, _Mapping]] = ..., tenant_mark: _Optional[bytes] = ..., pooling: _Optional[_Union[PoolingSpec, _Mapping]] = ..., adapter: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class PoolingSpec(_message.Message):
    __slots__ = ("pooling", "normalize", "dimensions", "label_token_ids")
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    pooling: _inference_pb2.Pooling
    normalize: bool
    dimensions: int
    label_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pooling: _Optional[_Union[_inference_pb2.Pooling, str]] = ..., normalize: bool = ..., dimensions: _Optional[int] = ..., label_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "n", "logprobs", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("key", "spec", "prefill")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    key: Key
    spec: RequestSpec
    prefill: bool
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., prefill: bool = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("key", "spec", "taker", "sources")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TAKER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    key: Key
    spec: RequestSpec
    taker: _kv_pb2.Taker
    sources: _containers.RepeatedCompositeFieldContainer[KVSource]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., spec: _Optional[_Union[RequestSpec, _Mapping]] = ..., taker: _Optional[_Union[_kv_pb2.Taker, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[KVSource, _Mapping]]] = ...) -> None: ...

class KVSource(_message.Message):
    __slots__ = ("handle", "ticket")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    ticket: bytes
    def __init__(self, handle: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("key", "handle", "ticket")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    key: Key
    handle: bytes
    ticket: bytes
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., handle: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "logprobs", "finished", "finish_reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    logprobs: _inference_pb2.Logprobs
    finished: bool
    finish_reason: _inference_pb2.FinishReason
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.Logprobs, _Mapping]] = ..., finished: bool = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("key", "first_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("key", "lease_id", "spans", "taker", "budget_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TAKER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    lease_id: bytes
    spans: SpanChain
    taker: _kv_pb2.Taker
    budget_ms: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., lease_id: _Optional[bytes] = ..., spans: _Optional[_Union[SpanChain, _Mapping]] = ..., taker: _Optional[_Union[_kv_pb2.Taker, _Mapping]] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class SpanChain(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "answered")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    key: Key
    answered: bool
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., answered: bool = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("key", "previous_attempt", "next_index", "budget_ms", "fingerprint", "traceparent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: Key
    previous_attempt: int
    next_index: _containers.RepeatedScalarFieldContainer[int]
    budget_ms: int
    fingerprint: bytes
    traceparent: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., previous_attempt: _Optional[int] = ..., next_index: _Optional[_Iterable[int]] = ..., budget_ms: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ("key", "lease_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    key: Key
    lease_id: bytes
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., lease_id: _Optional[bytes] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Beat(_message.Message):
    __slots__ = ("sent_ns", "offset_ns", "error_ns")
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    sent_ns: int
    offset_ns: int
    error_ns: int
    def __init__(self, sent_ns: _Optional[int] = ..., offset_ns: _Optional[int] = ..., error_ns: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("hello", "admit", "prefill", "fetch", "start", "offer", "cancel", "attach", "renew_lease", "subscribe", "beat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASE_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    admit: Admit
    prefill: Prefill
    fetch: Fetch
    start: Start
    offer: Offer
    cancel: Cancel
    attach: Attach
    renew_lease: RenewLease
    subscribe: Subscribe
    beat: Beat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., renew_lease: _Optional[_Union[RenewLease, _Mapping]] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("key", "num_cached_tokens", "num_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    num_cached_tokens: int
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., num_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "reason", "retry_after_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    reason: str
    retry_after_ms: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("key", "lease_id", "handle", "ticket", "num_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    lease_id: bytes
    handle: bytes
    ticket: bytes
    num_cached_tokens: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., lease_id: _Optional[bytes] = ..., handle: _Optional[bytes] = ..., ticket: _Optional[bytes] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Waits(_message.Message):
    __slots__ = ("place_s", "block_s")
    PLACE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    place_s: float
    block_s: float
    def __init__(self, place_s: _Optional[float] = ..., block_s: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("key", "first_tokens", "queue_s", "prefill_s", "num_cached_tokens", "num_chunks", "prompt_logprobs", "pooled", "waits", "pulled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    key: Key
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    queue_s: float
    prefill_s: float
    num_cached_tokens: int
    num_chunks: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    pooled: _containers.RepeatedScalarFieldContainer[float]
    waits: Waits
    pulled: Pulled
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ..., num_chunks: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., pooled: _Optional[_Iterable[float]] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ..., pulled: _Optional[_Union[Pulled, _Mapping]] = ...) -> None: ...

class Pulled(_message.Message):
    __slots__ = ("num_tokens", "failure", "reason")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    failure: str
    reason: str
    def __init__(self, num_tokens: _Optional[int] = ..., failure: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Offered(_message.Message):
    __slots__ = ("key", "lease_id", "handle", "ticket")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    key: Key
    lease_id: bytes
    handle: bytes
    ticket: bytes
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., lease_id: _Optional[bytes] = ..., handle: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class NotHere(_message.Message):
    __slots__ = ("key", "num_matched_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    num_matched_tokens: int
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., num_matched_tokens: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("key", "num_tokens", "num_bytes", "transport", "transfer_s", "after_last_ready_s", "num_bytes_early", "numerics")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_LAST_READY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_EARLY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    key: Key
    num_tokens: int
    num_bytes: int
    transport: str
    transfer_s: float
    after_last_ready_s: float
    num_bytes_early: int
    numerics: str
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., transfer_s: _Optional[float] = ..., after_last_ready_s: _Optional[float] = ..., num_bytes_early: _Optional[int] = ..., numerics: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("keys", "key_index", "choice", "first_index", "num_ids", "token_ids", "logprobs", "has_logprobs", "finish_reason")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_INDEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    key_index: _containers.RepeatedScalarFieldContainer[int]
    choice: _containers.RepeatedScalarFieldContainer[int]
    first_index: _containers.RepeatedScalarFieldContainer[int]
    num_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.Logprobs]
    has_logprobs: _containers.RepeatedScalarFieldContainer[bool]
    finish_reason: _containers.RepeatedScalarFieldContainer[_inference_pb2.FinishReason]
    def __init__(self, keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ..., key_index: _Optional[_Iterable[int]] = ..., choice: _Optional[_Iterable[int]] = ..., first_index: _Optional[_Iterable[int]] = ..., num_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.Logprobs, _Mapping]]] = ..., has_logprobs: _Optional[_Iterable[bool]] = ..., finish_reason: _Optional[_Iterable[_Union[_inference_pb2.FinishReason, str]]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("step", "num_running", "num_waiting", "num_blocks_free", "num_blocks_total", "num_waiting_tokens", "tokens_per_s", "state", "blocks_by_holder", "num_draft_tokens", "num_accepted_tokens", "ready_adapters", "core_wait", "tables", "wall_time_ns", "beat_sent_ns", "beat_held_ns")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    CORE_WAIT_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    BEAT_SENT_NS_FIELD_NUMBER: _ClassVar[int]
    BEAT_HELD_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_running: int
    num_waiting: int
    num_blocks_free: int
    num_blocks_total: int
    num_waiting_tokens: int
    tokens_per_s: float
    state: str
    blocks_by_holder: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    num_accepted_tokens: int
    ready_adapters: _containers.RepeatedScalarFieldContainer[bytes]
    core_wait: float
    tables: _containers.ScalarMap[str, int]
    wall_time_ns: int
    beat_sent_ns: int
    beat_held_ns: int
    def __init__(self, step: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_blocks_total: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., state: _Optional[str] = ..., blocks_by_holder: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., ready_adapters: _Optional[_Iterable[bytes]] = ..., core_wait: _Optional[float] = ..., tables: _Optional[_Mapping[str, int]] = ..., wall_time_ns: _Optional[int] = ..., beat_sent_ns: _Optional[int] = ..., beat_held_ns: _Optional[int] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("epoch", "seq", "snapshot", "sealed", "evicted", "touched")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    TOUCHED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    snapshot: bool
    sealed: _containers.RepeatedScalarFieldContainer[bytes]
    evicted: _containers.RepeatedScalarFieldContainer[bytes]
    touched: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., snapshot: bool = ..., sealed: _Optional[_Iterable[bytes]] = ..., evicted: _Optional[_Iterable[bytes]] = ..., touched: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DecodeReport(_message.Message):
    __slots__ = ("kv_wait_s", "decode_queue_s", "first_step_s", "decode_s", "num_steps", "num_preemptions", "num_drafts", "proposed_by_position", "accepted_by_position", "speedup", "waits")
    KV_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    kv_wait_s: float
    decode_queue_s: float
    first_step_s: float
    decode_s: float
    num_steps: int
    num_preemptions: int
    num_drafts: int
    proposed_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    speedup: float
    waits: Waits
    def __init__(self, kv_wait_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_drafts: _Optional[int] = ..., proposed_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., speedup: _Optional[float] = ..., waits: _Optional[_Union[Waits, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("key", "code", "reason", "message", "retry_after_ms", "decode")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    key: Key
    code: int
    reason: str
    message: str
    retry_after_ms: int
    decode: DecodeReport
    def __init__(self, key: _Optional[_Union[Key, _Mapping]] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., decode: _Optional[_Union[DecodeReport, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("hello", "granted", "refused", "accepted", "done", "offered", "not_here", "fetched", "step_output", "block_events", "ended", "load")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    NOT_HERE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    STEP_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    granted: Granted
    refused: Refused
    accepted: Accepted
    done: Done
    offered: Offered
    not_here: NotHere
    fetched: Fetched
    step_output: StepOutput
    block_events: BlockEvents
    ended: Ended
    load: Load
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., offered: _Optional[_Union[Offered, _Mapping]] = ..., not_here: _Optional[_Union[NotHere, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., step_output: _Optional[_Union[StepOutput, _Mapping]] = ..., block_events: _Optional[_Union[BlockEvents, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...
