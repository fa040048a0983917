from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("hello", "challenge", "proof", "sealed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    challenge: Challenge
    proof: Proof
    sealed: Sealed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "release", "nonce", "session", "taken")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    nonce: bytes
    session: bytes
    taken: int
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., nonce: _Optional[bytes] = ..., session: _Optional[bytes] = ..., taken: _Optional[int] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("protocol", "release", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    release: str
    nonce: bytes
    def __init__(self, protocol: _Optional[int] = ..., release: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof", "taken")
    PROOF_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    taken: int
    def __init__(self, proof: _Optional[bytes] = ..., taken: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("sequence", "mac", "head", "data", "taken")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    mac: bytes
    head: bytes
    data: bytes
    taken: int
    def __init__(self, sequence: _Optional[int] = ..., mac: _Optional[bytes] = ..., head: _Optional[bytes] = ..., data: _Optional[bytes] = ..., taken: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("beat", "attach", "attached", "start", "part", "progress", "lost", "forget", "close")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    beat: Beat
    attach: Attach
    attached: Attached
    start: Start
    part: Part
    progress: Progress
    lost: Lost
    forget: Forget
    close: Close
    def __init__(self, beat: _Optional[_Union[Beat, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("waiting",)
    WAITING_FIELD_NUMBER: _ClassVar[int]
    waiting: bool
    def __init__(self, waiting: _Optional[bool] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("number", "addresses", "fan_out", "timeout_ms", "reconnect_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    fan_out: int
    timeout_ms: int
    reconnect_ms: int
    def __init__(self, number: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., fan_out: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., reconnect_ms: _Optional[int] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("number", "address", "hostname", "cores", "memory", "pid", "python", "torch", "monarch", "network", "advertise", "data_bind")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    MONARCH_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    ADVERTISE_FIELD_NUMBER: _ClassVar[int]
    DATA_BIND_FIELD_NUMBER: _ClassVar[int]
    number: int
    address: str
    hostname: str
    cores: int
    memory: int
    pid: int
    python: str
    torch: str
    monarch: str
    network: str
    advertise: str
    data_bind: str
    def __init__(self, number: _Optional[int] = ..., address: _Optional[str] = ..., hostname: _Optional[str] = ..., cores: _Optional[int] = ..., memory: _Optional[int] = ..., pid: _Optional[int] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., monarch: _Optional[str] = ..., network: _Optional[str] = ..., advertise: _Optional[str] = ..., data_bind: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("number", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: str
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("hosts", "failures")
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[Host]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, hosts: _Optional[_Iterable[_Union[Host, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("kind", "mesh", "host", "all", "targets", "head", "size", "data")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kind: str
    mesh: int
    host: int
    all: bool
    targets: _containers.RepeatedScalarFieldContainer[int]
    head: bytes
    size: int
    data: int
    def __init__(self, kind: _Optional[str] = ..., mesh: _Optional[int] = ..., host: _Optional[int] = ..., all: _Optional[bool] = ..., targets: _Optional[_Iterable[int]] = ..., head: _Optional[bytes] = ..., size: _Optional[int] = ..., data: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("mesh", "host", "data")
    MESH_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    mesh: int
    host: int
    data: int
    def __init__(self, mesh: _Optional[int] = ..., host: _Optional[int] = ..., data: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("kind", "mesh", "numbers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    mesh: int
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[str] = ..., mesh: _Optional[int] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("start", "stop", "reason")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    reason: str
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("mesh",)
    MESH_FIELD_NUMBER: _ClassVar[int]
    mesh: int
    def __init__(self, mesh: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
