from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVGroup(_message.Message):
    __slots__ = ("kind", "num_layers", "num_kv_heads", "head_dim", "form", "block_size")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    form: str
    block_size: int
    def __init__(self, kind: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., form: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("version", "groups")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    def __init__(self, version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ...) -> None: ...

class KVPart(_message.Message):
    __slots__ = ("group", "layer_begin", "layer_end", "head_begin", "head_end", "endpoints")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_END_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    group: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, group: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_end: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "address", "host_id")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    host_id: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class KVHandle(_message.Message):
    __slots__ = ("source_instance", "source_epoch", "lease_id", "model_identity", "numerics_class", "layout", "parts", "num_tokens", "span_hashes", "chain_parent", "block_ids", "generations", "state_ids", "state_generations")
    SOURCE_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_HASHES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    STATE_IDS_FIELD_NUMBER: _ClassVar[int]
    STATE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    source_instance: bytes
    source_epoch: int
    lease_id: bytes
    model_identity: bytes
    numerics_class: str
    layout: KVLayout
    parts: _containers.RepeatedCompositeFieldContainer[KVPart]
    num_tokens: int
    span_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    chain_parent: bytes
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    state_ids: _containers.RepeatedScalarFieldContainer[int]
    state_generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source_instance: _Optional[bytes] = ..., source_epoch: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., model_identity: _Optional[bytes] = ..., numerics_class: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[KVPart, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., span_hashes: _Optional[_Iterable[bytes]] = ..., chain_parent: _Optional[bytes] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., state_ids: _Optional[_Iterable[int]] = ..., state_generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Taker(_message.Message):
    __slots__ = ("instance", "epoch", "layout", "numerics_class", "num_cached_tokens", "transports", "host_id")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    instance: bytes
    epoch: int
    layout: KVLayout
    numerics_class: str
    num_cached_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    def __init__(self, instance: _Optional[bytes] = ..., epoch: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., numerics_class: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("lease_id", "taker_instance", "taker_epoch", "fetch_id", "mac")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TAKER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TAKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FETCH_ID_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    taker_instance: bytes
    taker_epoch: int
    fetch_id: bytes
    mac: bytes
    def __init__(self, lease_id: _Optional[bytes] = ..., taker_instance: _Optional[bytes] = ..., taker_epoch: _Optional[int] = ..., fetch_id: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("token_begin", "token_end", "layer_begin", "layer_end")
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    token_begin: int
    token_end: int
    layer_begin: int
    layer_end: int
    def __init__(self, token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("ticket", "token_begin", "layout", "transport", "taker_instance", "taker_epoch", "part", "share", "num_shares", "digest", "in_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TAKER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TAKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    token_begin: int
    layout: KVLayout
    transport: str
    taker_instance: bytes
    taker_epoch: int
    part: KVPart
    share: int
    num_shares: int
    digest: str
    in_blocks: bool
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., token_begin: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., transport: _Optional[str] = ..., taker_instance: _Optional[bytes] = ..., taker_epoch: _Optional[int] = ..., part: _Optional[_Union[KVPart, _Mapping]] = ..., share: _Optional[int] = ..., num_shares: _Optional[int] = ..., digest: _Optional[str] = ..., in_blocks: bool = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("range", "generations", "digests", "payload_bytes", "hashes", "is_early")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_EARLY_FIELD_NUMBER: _ClassVar[int]
    range: Range
    generations: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    payload_bytes: int
    hashes: bytes
    is_early: bool
    def __init__(self, range: _Optional[_Union[Range, _Mapping]] = ..., generations: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., payload_bytes: _Optional[int] = ..., hashes: _Optional[bytes] = ..., is_early: bool = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("range",)
    RANGE_FIELD_NUMBER: _ClassVar[int]
    range: Range
    def __init__(self, range: _Optional[_Union[Range, _Mapping]] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("range", "num_tokens_confirmed")
    RANGE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    range: Range
    num_tokens_confirmed: int
    def __init__(self, range: _Optional[_Union[Range, _Mapping]] = ..., num_tokens_confirmed: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("status", "message")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    status: str
    message: str
    def __init__(self, status: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class KVFrame(_message.Message):
    __slots__ = ("want", "ready", "ack", "confirm", "end", "mapping", "renew")
    WANT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MAPPING_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    want: Want
    ready: Ready
    ack: Ack
    confirm: Confirm
    end: End
    mapping: Mapping
    renew: Renew
    def __init__(self, want: _Optional[_Union[Want, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., mapping: _Optional[_Union[Mapping, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ...) -> None: ...

class Mapping(_message.Message):
    __slots__ = ("num_bytes", "block_bytes", "access", "base", "device", "canary_bytes")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CANARY_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    block_bytes: int
    access: bytes
    base: int
    device: bytes
    canary_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ..., access: _Optional[bytes] = ..., base: _Optional[int] = ..., device: _Optional[bytes] = ..., canary_bytes: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
