"""The names of kio, the codecs of the Kafka protocol, that the broker uses.

kio imports hypothesis where that is installed, to register strategies for its types; hypothesis then writes a folder
`.hypothesis` into the working folder, 2 s and 200 MB the first time. A broker has no use for strategies and must not
write outside its data directory: kio is imported as if hypothesis were not installed, unless somebody has it already.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "ErrorCode",
    "SerialError",
    "entity_reader",
    "entity_writer",
    "load_request_schema",
    "load_response_schema",
]


@contextmanager
def _as_if_missing(name: str) -> Iterator[None]:
    """`import name` fails inside; what is imported already stays."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment] # the import system's own way to say so
    try:
        yield
    finally:
        del sys.modules[name]


with _as_if_missing("hypothesis"):
    from kio.index import load_request_schema, load_response_schema
    from kio.schema.errors import ErrorCode
    from kio.serial import entity_reader, entity_writer
    from kio.serial.errors import SerialError
