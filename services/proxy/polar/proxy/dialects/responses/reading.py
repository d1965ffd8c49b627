"""What is found in a request's items beside its messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...calls import Json, Media
from ..base import Limits
from ..budget import Unpacked
from .checks import unsupported, wrong


@dataclass(slots=True)
class Reading:
    """Filled while items are read, in their order."""

    limits: Limits
    media: list[Media] = field(default_factory=list)
    tools: list[tuple[str, list[Json]]] = field(default_factory=list)
    """Tools that items declare, with the path where they stand."""
    dropped: list[str] = field(default_factory=list)
    _unpacked: Unpacked = field(default_factory=Unpacked)

    def unpacked(self, text: str, where: str) -> str:
        """`text`, which came compressed; raises `BadRequest` where there is too much of it."""
        try:
            self._unpacked.take(text)
        except ValueError as error:
            raise wrong(where, f"{error}.") from None
        return text

    def provider(self, kind: str, where: str) -> None:
        """Leave out, or refuse, what only the provider could make use of."""
        if self.limits.provider_tools == "refuse":
            raise unsupported(where, f"{kind[:80]!r} belongs to a tool of the provider's, which is not available here")
        self.dropped.append(kind)

    def foreign(self, where: str) -> None:
        """Leave out, or refuse, reasoning that only its provider can read."""
        if self.limits.foreign_thinking == "refuse":
            raise unsupported(where, "reasoning of another provider cannot be read here")
        self.dropped.append("reasoning")
