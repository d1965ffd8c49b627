"""What users and trainers import: submit tasks, follow trajectories, render them."""

from .advantages import group_advantages
from .client import NoAnswer, PolarClient, TaskRefused

__all__ = ["NoAnswer", "PolarClient", "TaskRefused", "group_advantages"]
