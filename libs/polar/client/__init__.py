"""What users and trainers import: submit tasks, follow trajectories, render them."""

from .advantages import advantages_of, group_advantages
from .client import NoAnswer, PolarClient, SchedulerState, TaskRefused

__all__ = ["NoAnswer", "PolarClient", "SchedulerState", "TaskRefused", "advantages_of", "group_advantages"]
