"""Grading, leased by the scheduler, and finishing: from a decided grade to the published trajectory."""

from .finisher import FinisherService
from .node import GraderService
from .settings import EvaluatorSettings

__all__ = ["EvaluatorSettings", "FinisherService", "GraderService"]
