"""Proves the accounting of the log: what was accepted has finished or is in flight, and nothing is lost or doubled.

    report = await audit(bus)
    assert report.clean, report.offences

`Audit` is the pure part: fed with records, asked for a report.
"""

from .core import Audit, AuditOptions, Progress
from .reach import Extent, Reach
from .reading import audit
from .report import CHECKS, KINDS, AuditReport, Check, CheckResult, Letter, Offence, Place, TopicReach

__all__ = [
    "CHECKS",
    "KINDS",
    "Audit",
    "AuditOptions",
    "AuditReport",
    "Check",
    "CheckResult",
    "Extent",
    "Letter",
    "Offence",
    "Place",
    "Progress",
    "Reach",
    "TopicReach",
    "audit",
]
