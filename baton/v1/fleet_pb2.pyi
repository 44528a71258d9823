from baton.v1 import inference_pb2 as _inference_pb2
from baton.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartWorkersRequest(_message.Message):
    __slots__ = ("role", "number")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    role: str
    number: int
    def __init__(self, role: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class StartWorkersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[PlacedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[PlacedWorker, _Mapping]]] = ...) -> None: ...

class PlacedWorker(_message.Message):
    __slots__ = ("name", "role", "state", "address", "where", "reason", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    address: str
    where: str
    reason: str
    model: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., where: _Optional[str] = ..., reason: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "not_ready", "redis_url", "redis_down", "collector", "models")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    REDIS_URL_FIELD_NUMBER: _ClassVar[int]
    REDIS_DOWN_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    not_ready: str
    redis_url: str
    redis_down: str
    collector: str
    models: _containers.RepeatedCompositeFieldContainer[ModelView]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., not_ready: _Optional[str] = ..., redis_url: _Optional[str] = ..., redis_down: _Optional[str] = ..., collector: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ModelView, _Mapping]]] = ...) -> None: ...

class ModelView(_message.Message):
    __slots__ = ("name", "identity", "state", "reason", "num_running", "num_waiting", "num_prefill", "num_decode")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: bytes
    state: str
    reason: str
    num_running: int
    num_waiting: int
    num_prefill: int
    num_decode: int
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[bytes] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_prefill: _Optional[int] = ..., num_decode: _Optional[int] = ...) -> None: ...

class AddModelRequest(_message.Message):
    __slots__ = ("name", "path", "identity")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    identity: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class AddModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveModelResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("address", "role", "state", "reason", "hello", "load", "num_legs", "clock_offset_s", "clock_error_s", "breaker", "breaker_retry_s", "model")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_LEGS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    BREAKER_RETRY_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    address: str
    role: str
    state: str
    reason: str
    hello: _worker_pb2.Hello
    load: _worker_pb2.Load
    num_legs: int
    clock_offset_s: float
    clock_error_s: float
    breaker: str
    breaker_retry_s: float
    model: str
    def __init__(self, address: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., hello: _Optional[_Union[_worker_pb2.Hello, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., num_legs: _Optional[int] = ..., clock_offset_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ..., breaker: _Optional[str] = ..., breaker_retry_s: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("max_running", "max_recent")
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_RECENT_FIELD_NUMBER: _ClassVar[int]
    max_running: int
    max_recent: int
    def __init__(self, max_running: _Optional[int] = ..., max_recent: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("running", "recent", "num_running", "num_waiting", "num_ended", "num_input_tokens", "num_output_tokens", "uptime_s", "bound", "num_answered")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    NUM_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    running: _containers.RepeatedCompositeFieldContainer[RequestView]
    recent: _containers.RepeatedCompositeFieldContainer[RequestView]
    num_running: int
    num_waiting: int
    num_ended: int
    num_input_tokens: int
    num_output_tokens: int
    uptime_s: float
    bound: str
    num_answered: int
    def __init__(self, running: _Optional[_Iterable[_Union[RequestView, _Mapping]]] = ..., recent: _Optional[_Iterable[_Union[RequestView, _Mapping]]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_ended: _Optional[int] = ..., num_input_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., uptime_s: _Optional[float] = ..., bound: _Optional[str] = ..., num_answered: _Optional[int] = ...) -> None: ...

class RequestView(_message.Message):
    __slots__ = ("request_id", "trace_id", "phase", "outcome", "reason", "age_s", "ended_s", "prompt_tokens", "cached_tokens", "output_tokens", "timing", "prefill", "decode", "num_attempts", "tenant", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    trace_id: str
    phase: str
    outcome: str
    reason: str
    age_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    timing: _inference_pb2.Timing
    prefill: str
    decode: str
    num_attempts: int
    tenant: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., phase: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., timing: _Optional[_Union[_inference_pb2.Timing, _Mapping]] = ..., prefill: _Optional[str] = ..., decode: _Optional[str] = ..., num_attempts: _Optional[int] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...
