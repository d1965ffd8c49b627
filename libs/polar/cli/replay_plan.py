"""Whether what is to be published again is whole. Pure: records of `polar.trajectories` in, words for people out."""

from __future__ import annotations

from dataclasses import dataclass, field

from polar.schemas import GroupClosed, Trajectory

from .counting import counted


@dataclass(slots=True)
class Found:
    """What `polar.trajectories` has of one task or one group."""

    sessions: set[str] = field(default_factory=set)
    wanted: int = 0
    """Sessions that a task has, as its trajectories say."""
    groups: set[str] = field(default_factory=set)
    """Of its trajectories; a session that is a group of its own is in none."""
    closed: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    """Listed in a `GroupClosed`; of a task: its own."""
    others: set[str] = field(default_factory=set)
    """Listed there, of other tasks."""


class Evidence:
    """What there is of some tasks, or of some groups."""

    def __init__(self, *, tasks: frozenset[str] = frozenset(), groups: frozenset[str] = frozenset()) -> None:
        self.tasks = {name: Found() for name in sorted(tasks)}
        self.groups = {name: Found() for name in sorted(groups)}

    def take(self, event: Trajectory | GroupClosed) -> bool:
        """The next record; whether it is wanted."""
        if isinstance(event, Trajectory):
            hit = [one for one in (self.tasks.get(event.task_id), self.groups.get(event.group_id)) if one is not None]
            for found in hit:
                found.sessions.add(event.session_id)
                found.wanted = max(found.wanted, event.num_samples)
                if event.group_id != event.session_id:
                    found.groups.add(event.group_id)
            return bool(hit)
        wanted = False
        for name in event.tasks:
            task = self.tasks.get(name)
            if task is None:
                continue
            wanted = True
            task.closed.add(event.group_id)
            task.groups.add(event.group_id)
            task.members |= {one.session_id for one in event.members if one.task_id == name}
            task.others |= {one.session_id for one in event.members if one.task_id not in self.tasks}
        group = self.groups.get(event.group_id)
        if group is not None:
            wanted = True
            group.closed.add(event.group_id)
            group.members |= {one.session_id for one in event.members}
        return wanted

    def problems(self, finished: frozenset[str] = frozenset(), running: frozenset[str] = frozenset()) -> list[str]:
        """Why the tasks or groups cannot be published whole; empty: they can.

        Args:
            finished: tasks that have a result.
            running: tasks that the scheduler has on its books without one.
        """
        return [
            *(one for name, found in self.tasks.items() for one in _of_task(name, found, finished, running)),
            *(one for name, found in self.groups.items() for one in _of_group(name, found)),
        ]

    def notices(self) -> list[str]:
        """What a reader of the copy should know."""
        return [
            f"task {name}: its group lists {counted(len(found.others), 'session')} of other tasks, not published here"
            for name, found in self.tasks.items()
            if found.others
        ]


def _of_task(name: str, found: Found, finished: frozenset[str], running: frozenset[str]) -> list[str]:
    have = len(found.sessions)
    lost = len(found.members - found.sessions)
    if not have and not found.members:
        if name in finished:
            return [f"task {name} has finished, but polar.trajectories no longer has anything of it"]
        if name in running:
            return [f"task {name} is not finished: none of its sessions is"]
        return [f"task {name} is not known: neither polar.trajectories nor the scheduler has anything of it"]
    if lost:
        gone = f"{lost} of its {counted(lost + have, 'trajectory', 'trajectories')}"
        return [f"task {name}: polar.trajectories no longer has {gone}"]
    if have < found.wanted:
        if name in finished:
            gone = f"{found.wanted - have} of its {found.wanted} trajectories"
            return [f"task {name}: polar.trajectories no longer has {gone}"]
        return [f"task {name} is not finished: {have} of {found.wanted} trajectories so far"]
    return [f"task {name}: its group {one} is not decided yet" for one in sorted(found.groups - found.closed)]


def _of_group(name: str, found: Found) -> list[str]:
    if not found.sessions and not found.members:
        return [f"group {name} is not known: polar.trajectories has nothing of it"]
    lost = len(found.members - found.sessions)
    if lost:
        return [f"group {name}: polar.trajectories no longer has {lost} of its {len(found.members)} members"]
    if found.groups and not found.closed:
        return [f"group {name} is not decided yet: {counted(len(found.sessions), 'trajectory', 'trajectories')} so far"]
    return []
