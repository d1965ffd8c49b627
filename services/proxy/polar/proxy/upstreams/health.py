"""Whether an engine gets calls, by what was seen of it. A pure state machine: told what happened, it says what changed.

An engine that accepts no connection is out at once; one whose connections break or whose probes fail is out after
`failures` of them in a row. It is back with the first sign of life, save that an engine which says of itself that it is
ill (a failed probe) is back only when it says that it is well.
"""

from __future__ import annotations

REFUSED, BROKEN, ILL = "refused", "broken", "ill"


class Health:
    """One engine's. Methods return whether they changed `out`."""

    def __init__(self, failures: int) -> None:
        self.out: str | None = None
        """Why it gets no calls: one of the three above; None: it does."""
        self._failures = failures
        self._broken = 0
        self._ill = 0

    def refused(self) -> bool:
        """It does not accept a connection."""
        return self._eject(REFUSED)

    def broke(self) -> bool:
        """A connection broke before its answer was whole."""
        self._broken += 1
        return self._broken >= self._failures and self._eject(BROKEN)

    def ill(self) -> bool:
        """It answers a probe with an error, or not in time."""
        self._ill += 1
        return self._ill >= self._failures and self._eject(ILL)

    def answered(self) -> bool:
        """It answered a call to its end."""
        self._broken = 0
        return self.out != ILL and self._return()

    def well(self) -> bool:
        """It says that it is well."""
        self._ill = 0
        if self.out == BROKEN:
            # a listening engine may well break every call; trying it again is what a return is
            self._broken = 0
        return self._return()

    def _eject(self, why: str) -> bool:
        changed = self.out is None
        self.out = why
        return changed

    def _return(self) -> bool:
        changed, self.out = self.out is not None, None
        return changed
