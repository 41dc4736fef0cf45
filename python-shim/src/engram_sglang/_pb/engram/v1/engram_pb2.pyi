from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_MODE_UNSPECIFIED: _ClassVar[TransferMode]
    TRANSFER_MODE_IPC: _ClassVar[TransferMode]
    TRANSFER_MODE_ENGINE: _ClassVar[TransferMode]

class DeviceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_KIND_UNSPECIFIED: _ClassVar[DeviceKind]
    DEVICE_KIND_HOST: _ClassVar[DeviceKind]
    DEVICE_KIND_CUDA: _ClassVar[DeviceKind]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_U8: _ClassVar[DType]
    DTYPE_F16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_F32: _ClassVar[DType]
    DTYPE_F8_E4M3: _ClassVar[DType]
    DTYPE_F8_E5M2: _ClassVar[DType]

class PoolLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_LAYOUT_UNSPECIFIED: _ClassVar[PoolLayout]
    POOL_LAYOUT_PER_LAYER: _ClassVar[PoolLayout]
    POOL_LAYOUT_PAGE_MAJOR: _ClassVar[PoolLayout]
TRANSFER_MODE_UNSPECIFIED: TransferMode
TRANSFER_MODE_IPC: TransferMode
TRANSFER_MODE_ENGINE: TransferMode
DEVICE_KIND_UNSPECIFIED: DeviceKind
DEVICE_KIND_HOST: DeviceKind
DEVICE_KIND_CUDA: DeviceKind
DTYPE_UNSPECIFIED: DType
DTYPE_U8: DType
DTYPE_F16: DType
DTYPE_BF16: DType
DTYPE_F32: DType
DTYPE_F8_E4M3: DType
DTYPE_F8_E5M2: DType
POOL_LAYOUT_UNSPECIFIED: PoolLayout
POOL_LAYOUT_PER_LAYER: PoolLayout
POOL_LAYOUT_PAGE_MAJOR: PoolLayout

class StateTensor(_message.Message):
    __slots__ = ("name", "dtype", "layers", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    layers: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., layers: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class KvLayer(_message.Message):
    __slots__ = ("layer", "dtype", "heads", "k_head_dim", "v_head_dim")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    K_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    layer: int
    dtype: DType
    heads: int
    k_head_dim: int
    v_head_dim: int
    def __init__(self, layer: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., heads: _Optional[int] = ..., k_head_dim: _Optional[int] = ..., v_head_dim: _Optional[int] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("architecture", "config_digest", "weights_digest", "display_name", "packing")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DISPLAY_NAME_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    config_digest: bytes
    weights_digest: bytes
    display_name: str
    packing: int
    def __init__(self, architecture: _Optional[str] = ..., config_digest: _Optional[bytes] = ..., weights_digest: _Optional[bytes] = ..., display_name: _Optional[str] = ..., packing: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("attn_tp_size", "attn_tp_rank")
    ATTN_TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTN_TP_RANK_FIELD_NUMBER: _ClassVar[int]
    attn_tp_size: int
    attn_tp_rank: int
    def __init__(self, attn_tp_size: _Optional[int] = ..., attn_tp_rank: _Optional[int] = ...) -> None: ...

class Ring(_message.Message):
    __slots__ = ("bytes", "device", "device_uuid", "ipc_handle", "ipc_offset")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    IPC_OFFSET_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    device: DeviceKind
    device_uuid: bytes
    ipc_handle: bytes
    ipc_offset: int
    def __init__(self, bytes: _Optional[int] = ..., device: _Optional[_Union[DeviceKind, str]] = ..., device_uuid: _Optional[bytes] = ..., ipc_handle: _Optional[bytes] = ..., ipc_offset: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("protocol", "channel_version", "instance", "shard", "model", "state", "kv", "unknown", "ring", "layout", "page_size", "slots", "rows", "boundary_grid", "modes", "versions", "epoch", "token", "not_attaching")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_GRID_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NOT_ATTACHING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    channel_version: int
    instance: bytes
    shard: Shard
    model: ModelIdentity
    state: _containers.RepeatedCompositeFieldContainer[StateTensor]
    kv: _containers.RepeatedCompositeFieldContainer[KvLayer]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    ring: Ring
    layout: PoolLayout
    page_size: int
    slots: int
    rows: int
    boundary_grid: int
    modes: _containers.RepeatedScalarFieldContainer[TransferMode]
    versions: _containers.ScalarMap[str, str]
    epoch: int
    token: str
    not_attaching: str
    def __init__(self, protocol: _Optional[int] = ..., channel_version: _Optional[int] = ..., instance: _Optional[bytes] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., state: _Optional[_Iterable[_Union[StateTensor, _Mapping]]] = ..., kv: _Optional[_Iterable[_Union[KvLayer, _Mapping]]] = ..., unknown: _Optional[_Iterable[str]] = ..., ring: _Optional[_Union[Ring, _Mapping]] = ..., layout: _Optional[_Union[PoolLayout, str]] = ..., page_size: _Optional[int] = ..., slots: _Optional[int] = ..., rows: _Optional[int] = ..., boundary_grid: _Optional[int] = ..., modes: _Optional[_Iterable[_Union[TransferMode, str]]] = ..., versions: _Optional[_Mapping[str, str]] = ..., epoch: _Optional[int] = ..., token: _Optional[str] = ..., not_attaching: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("attached", "refusal")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    refusal: Refusal
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("session", "secret", "boot", "mode", "channel_version", "fd_socket", "heartbeat_ms", "block_tokens", "fingerprint")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FD_SOCKET_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    secret: bytes
    boot: bytes
    mode: TransferMode
    channel_version: int
    fd_socket: str
    heartbeat_ms: int
    block_tokens: int
    fingerprint: bytes
    def __init__(self, session: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., boot: _Optional[bytes] = ..., mode: _Optional[_Union[TransferMode, str]] = ..., channel_version: _Optional[int] = ..., fd_socket: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., block_tokens: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message", "retry_after_ms")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Refusal.Reason]
        PROTOCOL_VERSION: _ClassVar[Refusal.Reason]
        CHANNEL_VERSION: _ClassVar[Refusal.Reason]
        UNKNOWN_POOL: _ClassVar[Refusal.Reason]
        BAD_GEOMETRY: _ClassVar[Refusal.Reason]
        BAD_IDENTITY: _ClassVar[Refusal.Reason]
        RING_TOO_SMALL: _ClassVar[Refusal.Reason]
        NO_COMMON_MODE: _ClassVar[Refusal.Reason]
        DEVICE_UNAVAILABLE: _ClassVar[Refusal.Reason]
        UNAUTHENTICATED: _ClassVar[Refusal.Reason]
        NOT_READY: _ClassVar[Refusal.Reason]
        TOO_MANY_WORKERS: _ClassVar[Refusal.Reason]
        UNSUPPORTED: _ClassVar[Refusal.Reason]
        SELF_TEST: _ClassVar[Refusal.Reason]
    REASON_UNSPECIFIED: Refusal.Reason
    PROTOCOL_VERSION: Refusal.Reason
    CHANNEL_VERSION: Refusal.Reason
    UNKNOWN_POOL: Refusal.Reason
    BAD_GEOMETRY: Refusal.Reason
    BAD_IDENTITY: Refusal.Reason
    RING_TOO_SMALL: Refusal.Reason
    NO_COMMON_MODE: Refusal.Reason
    DEVICE_UNAVAILABLE: Refusal.Reason
    UNAUTHENTICATED: Refusal.Reason
    NOT_READY: Refusal.Reason
    TOO_MANY_WORKERS: Refusal.Reason
    UNSUPPORTED: Refusal.Reason
    SELF_TEST: Refusal.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: Refusal.Reason
    message: str
    retry_after_ms: int
    def __init__(self, reason: _Optional[_Union[Refusal.Reason, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("hello", "beat", "done")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    beat: WorkerBeat
    done: WorkDone
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., beat: _Optional[_Union[WorkerBeat, _Mapping]] = ..., done: _Optional[_Union[WorkDone, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("session", "secret")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    secret: bytes
    def __init__(self, session: _Optional[bytes] = ..., secret: _Optional[bytes] = ...) -> None: ...

class WorkerBeat(_message.Message):
    __slots__ = ("ticks", "slots_free", "slots_total", "rows_free", "rows_total", "running", "waiting", "hooks")
    TICKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ROWS_FREE_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HOOKS_FIELD_NUMBER: _ClassVar[int]
    ticks: int
    slots_free: int
    slots_total: int
    rows_free: int
    rows_total: int
    running: int
    waiting: int
    hooks: _containers.RepeatedCompositeFieldContainer[HookTime]
    def __init__(self, ticks: _Optional[int] = ..., slots_free: _Optional[int] = ..., slots_total: _Optional[int] = ..., rows_free: _Optional[int] = ..., rows_total: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., hooks: _Optional[_Iterable[_Union[HookTime, _Mapping]]] = ...) -> None: ...

class HookTime(_message.Message):
    __slots__ = ("name", "calls", "mean_ns", "p99_ns", "max_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    MEAN_NS_FIELD_NUMBER: _ClassVar[int]
    P99_NS_FIELD_NUMBER: _ClassVar[int]
    MAX_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    calls: int
    mean_ns: int
    p99_ns: int
    max_ns: int
    def __init__(self, name: _Optional[str] = ..., calls: _Optional[int] = ..., mean_ns: _Optional[int] = ..., p99_ns: _Optional[int] = ..., max_ns: _Optional[int] = ...) -> None: ...

class WorkDone(_message.Message):
    __slots__ = ("number", "ok", "message")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    ok: bool
    message: str
    def __init__(self, number: _Optional[int] = ..., ok: bool = ..., message: _Optional[str] = ...) -> None: ...

class DaemonEvent(_message.Message):
    __slots__ = ("beat", "work", "closing")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    beat: DaemonBeat
    work: Work
    closing: Closing
    def __init__(self, beat: _Optional[_Union[DaemonBeat, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class DaemonBeat(_message.Message):
    __slots__ = ("boot", "beats")
    BOOT_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    boot: bytes
    beats: int
    def __init__(self, boot: _Optional[bytes] = ..., beats: _Optional[int] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("number", "offer_again")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFER_AGAIN_FIELD_NUMBER: _ClassVar[int]
    number: int
    offer_again: OfferAgain
    def __init__(self, number: _Optional[int] = ..., offer_again: _Optional[_Union[OfferAgain, _Mapping]] = ...) -> None: ...

class OfferAgain(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: str
    def __init__(self, conversation: _Optional[str] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("reason", "retry_after_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    retry_after_ms: int
    def __init__(self, reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "boot", "ready", "not_ready", "workers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot: bytes
    ready: bool
    not_ready: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, version: _Optional[str] = ..., boot: _Optional[bytes] = ..., ready: bool = ..., not_ready: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("session", "instance", "shard", "model", "fingerprint", "mode", "epoch", "beat")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    instance: bytes
    shard: Shard
    model: str
    fingerprint: bytes
    mode: TransferMode
    epoch: int
    beat: WorkerBeat
    def __init__(self, session: _Optional[bytes] = ..., instance: _Optional[bytes] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., model: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., mode: _Optional[_Union[TransferMode, str]] = ..., epoch: _Optional[int] = ..., beat: _Optional[_Union[WorkerBeat, _Mapping]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    reason: str
    def __init__(self, session: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...
