"""Server-sent events from an engine. Pure: bytes in, data out."""

from __future__ import annotations

from .errors import EngineBroken


class Events:
    """Cuts a stream of server-sent events into the data of each; lines may be as long as an answer may."""

    def __init__(self, limit: int) -> None:
        self._rest = b""
        self._left = limit
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the lines that `data` completes.

        Raises:
            EngineBroken: more than `limit` bytes have come.
        """
        self._left -= len(data)
        if self._left < 0:
            raise EngineBroken(f"the engine's answer is over {self._limit} bytes")
        *lines, self._rest = (self._rest + data).split(b"\n")
        # vLLM writes one data line per event; comments and other fields mean nothing here
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
