# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CountsRequest(_message.Message):
    __slots__ = ("incarnation", "request_ids")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[str] = ..., request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class CountsReply(_message.Message):
    __slots__ = ("known", "alive", "total_tokens", "requests")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    alive: bool
    total_tokens: int
    requests: _containers.RepeatedCompositeFieldContainer[RequestCount]
    def __init__(self, known: _Optional[bool] = ..., alive: _Optional[bool] = ..., total_tokens: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[RequestCount, _Mapping]]] = ...) -> None: ...

class RequestCount(_message.Message):
    __slots__ = ("request_id", "tokens", "finished", "first_version", "last_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    finished: bool
    first_version: int
    last_version: int
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ..., finished: _Optional[bool] = ..., first_version: _Optional[int] = ..., last_version: _Optional[int] = ...) -> None: ...
