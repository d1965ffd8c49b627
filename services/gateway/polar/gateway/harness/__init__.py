"""Harnesses: how each agent program is started in a box, behind one small interface, loaded by name."""

from .interface import Harness, HarnessRefused, Launch, Session
from .registry import load_harness

__all__ = ["Harness", "HarnessRefused", "Launch", "Session", "load_harness"]
