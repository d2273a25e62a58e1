"""The bodies of requests and answers, for the OpenAPI schema."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["calm", "drifting", "collapsed", "unwatched"]


class Error(BaseModel):
    error: str  # one sentence


class Health(BaseModel):
    status: Literal["ok"]


class Input(BaseModel):
    dtype: str
    shape: list[int]


class BundleInfo(BaseModel):
    name: str
    method: str
    classes: list[str]
    input: Input


class Bundles(BaseModel):
    bundles: list[BundleInfo]


class Heads(BaseModel):
    """What each head answers alone."""

    model_config = ConfigDict(populate_by_name=True)
    of_global: str = Field(alias="global")
    personal: str


class Answer(BaseModel):
    label: str
    index: int
    probability: float
    probabilities: dict[str, float]
    weight: float | None  # of the global head
    heads: Heads | None
    why: str
    status: Status
    position: int  # samples of the stream so far, with this one


class NewStream(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bundle: Annotated[str, Field(max_length=200)] | None = None  # may be left out where one is served
    name: Annotated[str, Field(pattern=r"^[\w. -]{1,100}$")] = "online"


class Stream(BaseModel):
    id: str
    bundle: str
    position: int
    status: Status | None  # of the last answer; null before the first
    created: datetime
    used: datetime  # when its last sample was answered, or it was begun


class Streams(BaseModel):
    streams: list[Stream]


class Logged(BaseModel):
    position: int  # of the sample in its stream, from 0
    time: datetime | None  # null if an older version of the service answered
    key: str | None
    answer: Answer


class Log(BaseModel):
    answers: list[Logged]
    next: int | None  # where the next page begins; null if this is the last


CODES = {
    400: "The sample or the request is refused.",
    401: "A token is needed.",
    404: "There is no such stream or bundle.",
    405: "The method is not allowed.",
    408: "The body takes too long.",
    409: "The Idempotency-Key was used for something else.",
    413: "The body or the image is too large.",
    415: "The body is of no known type.",
    422: "The request is not valid.",
    429: "Too many requests.",
    500: "Something went wrong.",
    503: "Too much to do, or the database does not answer.",
}
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": Error, "description": said} for code, said in CODES.items()}
_JSON = {
    "type": "object",
    "oneOf": [{"required": ["image"]}, {"required": ["x"]}],
    "properties": {
        "image": {"type": "string", "format": "byte", "description": "an image file in base64"},
        "x": {"type": "array", "items": {}, "description": "numbers: pixels [h, w, c], features or tokens"},
    },
}
_FORM = {"type": "object", "required": ["image"], "properties": {"image": {"type": "string", "format": "binary"}}}
SAMPLE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": _FORM}, "application/json": {"schema": _JSON}},
    }
}
