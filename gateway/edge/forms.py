"""Read a request's form (multipart/form-data): its texts as a msgspec Struct, and its file."""

from __future__ import annotations

from collections import defaultdict
from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from gateway.edge import bodies
from gateway.edge.errors import ApiError, shown

MAX_FIELDS = 64  # more than any API here has
MAX_HEAD = 8192  # bytes
Body = TypeVar("Body", bound=msgspec.Struct)


class FormField(NamedTuple):
    """A field of a form: a text or a file."""

    name: str
    content: bytes

    def text(self) -> str:
        try:
            return self.content.decode()
        except UnicodeDecodeError:
            name = shown(self.name)
            raise ApiError(400, f"'{name}' is not valid UTF-8.", name, "invalid_value") from None


async def read(request: Request, struct: type[Body], file_field: str) -> tuple[Body, bytes]:
    """Return the texts of the form as this Struct, and its file. Raise ApiError with the name of a wrong field.

    A field whose name ends with [] is a list.
    """
    head = Message()
    head["content-type"] = request.headers["content-type"]
    contents: defaultdict[str, list[FormField]] = defaultdict(list)
    try:
        boundary = head.get_boundary() or ""
    except (TypeError, ValueError):  # the parser's errors for continued parameters
        raise malformed("its content type is malformed") from None
    for field in split(await request.body(), boundary):
        contents[field.name].append(field)
    file = contents.pop(file_field, [])
    for name, fields in contents.items():
        if len(fields) > 1 and not name.endswith("[]"):
            raise ApiError(400, f"The form has '{shown(name)}' several times.", shown(name), "invalid_value")
    texts = {name: [field.text() for field in fields] for name, fields in contents.items()}
    values = {name: own if name.endswith("[]") else own[0] for name, own in texts.items()}
    body = bodies.convert(values, struct, strict=False)
    if not file:
        message = f"Missing required parameter: '{file_field}'."
        raise ApiError(400, message, file_field, "missing_required_parameter")
    if len(file) > 1 or not file[0].content:
        message = f"'{file_field}' must be one file that is not empty."
        raise ApiError(400, message, file_field, "invalid_value")
    return body, file[0].content


def split(body: bytes, boundary: str) -> list[FormField]:
    """Return the fields of a form. Raise ApiError if it is malformed or has too many."""
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    _, *parts = (b"\r\n" + body).split(delimiter, MAX_FIELDS + 2)
    if not boundary or not parts:
        raise malformed("nothing in it has the 'boundary' that its content type names")
    if len(parts) > MAX_FIELDS + 1:
        raise ApiError(400, f"The form has more than {MAX_FIELDS} fields.")
    if not parts.pop().startswith(b"--"):
        raise malformed("its end is missing")
    return [read_field(part) for part in parts]


def read_field(part: bytes) -> FormField:
    head, _, content = part.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD:
        raise malformed(f"the head of a field has more than {MAX_HEAD} bytes")
    try:
        name = BytesHeaderParser().parsebytes(head.lstrip()).get_param("name", header="content-disposition")
    except (TypeError, ValueError):
        name = None
    if not name or not isinstance(name, str):
        raise malformed("a field has no name")
    return FormField(name, content)


def malformed(reason: str) -> ApiError:
    return ApiError(400, f"The body is not a valid form ({bodies.FORM}): {reason}.")
