"""The one decider: a pure state machine over the log, in a thin shell."""

from .service import SchedulerService

__all__ = ["SchedulerService"]
