"""Engines for development: they speak vLLM's chat API, exactly enough that nothing else needs to know which it has.

- `ScriptedEngine` answers from a script (tests): any text, tool call, delay, error or broken connection, with real
  token ids.
- `python -m polar.devmodel serve` runs a real 135M model on the CPU (demos): slow, small, and never for production.

This package imports nothing of Polar. The CPU model needs the wheels of the extra `demo`; the scripted engine does not.
"""

from .chat import ChatTokenizer
from .errors import ApiError, EngineError, ModelUnavailable
from .lifecycle import Stats
from .script import Failure, Match, Reply, Rule, Script, View
from .scripted import Recorded, ScriptedEngine

__all__ = [
    "ApiError",
    "ChatTokenizer",
    "EngineError",
    "Failure",
    "Match",
    "ModelUnavailable",
    "Recorded",
    "Reply",
    "Rule",
    "Script",
    "ScriptedEngine",
    "Stats",
    "View",
]
