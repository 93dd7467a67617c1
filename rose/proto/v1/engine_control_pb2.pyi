# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineDescription(_message.Message):
    __slots__ = ("engine_id", "incarnation", "pid", "http_port", "weight_version", "paused", "poisoned", "vllm_version")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    POISONED_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    incarnation: str
    pid: int
    http_port: int
    weight_version: int
    paused: bool
    poisoned: str
    vllm_version: str
    def __init__(self, engine_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., http_port: _Optional[int] = ..., weight_version: _Optional[int] = ..., paused: _Optional[bool] = ..., poisoned: _Optional[str] = ..., vllm_version: _Optional[str] = ...) -> None: ...

class LayoutsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LayoutsReply(_message.Message):
    __slots__ = ("layouts",)
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    layouts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layouts: _Optional[_Iterable[str]] = ...) -> None: ...

class WayStep(_message.Message):
    __slots__ = ("manifest", "backwards")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BACKWARDS_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    backwards: bool
    def __init__(self, manifest: _Optional[str] = ..., backwards: _Optional[bool] = ...) -> None: ...

class StageVersionRequest(_message.Message):
    __slots__ = ("version", "objects", "way")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    version: int
    objects: str
    way: _containers.RepeatedCompositeFieldContainer[WayStep]
    def __init__(self, version: _Optional[int] = ..., objects: _Optional[str] = ..., way: _Optional[_Iterable[_Union[WayStep, _Mapping]]] = ...) -> None: ...

class StageVersionReply(_message.Message):
    __slots__ = ("encoded_bytes", "verify_ms")
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    encoded_bytes: int
    verify_ms: float
    def __init__(self, encoded_bytes: _Optional[int] = ..., verify_ms: _Optional[float] = ...) -> None: ...

class CommitVersionRequest(_message.Message):
    __slots__ = ("version", "keep_kv")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_KV_FIELD_NUMBER: _ClassVar[int]
    version: int
    keep_kv: bool
    def __init__(self, version: _Optional[int] = ..., keep_kv: _Optional[bool] = ...) -> None: ...

class CommitVersionReply(_message.Message):
    __slots__ = ("pause_ms", "load_ms")
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    pause_ms: float
    load_ms: float
    def __init__(self, pause_ms: _Optional[float] = ..., load_ms: _Optional[float] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("boundary", "what", "expected", "to_do")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    TO_DO_FIELD_NUMBER: _ClassVar[int]
    boundary: str
    what: str
    expected: str
    to_do: str
    def __init__(self, boundary: _Optional[str] = ..., what: _Optional[str] = ..., expected: _Optional[str] = ..., to_do: _Optional[str] = ...) -> None: ...
