"""Trajectories from captured calls: a pure core (`rebuild`, `build`) and the service that runs it on the log."""

from .build import build, rebuild, summarize
from .session import Account, Entry, SessionState, Verdict

__all__ = ["Account", "Entry", "SessionState", "Verdict", "build", "rebuild", "summarize"]
