"""Whatever a right log holds, the audit finds nothing in it, and its sums add up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.audit import AuditOptions, Extent, Reach, views
from polar.schemas import Status
from polar.schemas.topics import BY_NAME
from tests.audit.model import (
    CallPlan,
    LogModel,
    SessionPlan,
    TaskPlan,
    audited,
    partition_of,
    reach_of,
)

calls = st.builds(
    CallPlan,
    ending=st.sampled_from(["captured", "captured", "captured", "failed", "open", "late_end", "unstarted"]),
    choices=st.sampled_from([1, 1, 1, 2]),
    delta=st.booleans(),
    repeated=st.booleans(),
)
sessions = st.builds(
    SessionPlan,
    attempts=st.lists(st.lists(calls, max_size=4).map(tuple), max_size=3).map(tuple),
    until=st.sampled_from(["queued", "running", "closed", "built", "graded", "finished", "final", "final", "final"]),
    late_calls=st.integers(0, 2),
    after=st.booleans(),
    status=st.sampled_from(list(Status)),
    reward=st.sampled_from([None, 0.0, 0.25, 1.0]),
    strategy=st.sampled_from(["prefix_merging", "per_request"]),
    unpublishable=st.booleans(),
)
tasks = st.builds(
    TaskPlan,
    sessions=st.lists(sessions, min_size=1, max_size=4).map(tuple),
    repeated=st.booleans(),
    deadline=st.booleans(),
    rejected=st.sampled_from([False, False, False, True]),
)
logs = st.builds(lambda plans, seed: LogModel(plans, seed).run(), st.lists(tasks, max_size=3), st.integers(0, 2**16))
thorough = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(logs)
@thorough
def test_a_right_log_is_clean_and_its_sums_add_up(model: LogModel) -> None:
    report = audited(model.records)
    assert report.clean, report.offences
    counts = {"finished": 0, "in_flight": 0, "calls": 0, **report.counts}
    assert counts.get("accepted", 0) == len(model.lives) == counts["finished"] + counts["in_flight"]
    assert counts["finished"] == sum(life.published is not None for life in model.lives)
    assert counts["calls"] == sum(number for name, number in counts.items() if name in FATES)
    assert sum(one.unjudged for one in report.checks) == 0, "all of the log is there, so all can be judged"


FATES = {
    f"calls_{fate}" for fate in ("traced", "aside", "fenced", "late", "unfinished", "failed", "untold", "in_flight")
}


@given(logs, st.data())
@thorough
def test_what_was_written_after_the_marks_is_no_offence(model: LogModel, data: st.DataObject) -> None:
    """A snapshot ends anywhere: what a record lacks counts only below its mark."""
    cut = data.draw(st.integers(0, len(model.records)))
    # the model writes effects after their causes, and the parts of a transaction in any order, within a few records
    marked = data.draw(st.integers(max(0, cut - 30), max(0, cut - 10)))
    seen, below = model.records[:cut], model.records[:marked]
    whole = reach_of(model.records)
    extents = {}
    for topic, partition in whole._extents:
        ends = [one.offset + 1 for one in seen if (one.topic, one.partition) == (topic, partition)]
        marks = [one.offset + 1 for one in below if (one.topic, one.partition) == (topic, partition)]
        extents[topic, partition] = Extent(0, max(marks, default=0), max(ends, default=0))
    report = audited(seen, reach=Reach(extents, partition_of))
    assert report.clean, report.offences


@given(logs, st.data())
@thorough
def test_what_retention_took_is_no_offence(model: LogModel, data: st.DataObject) -> None:
    starts = {}
    for topic, partition in reach_of(model.records)._extents:
        if topic != "leases":
            offsets = [one.offset for one in model.records if (one.topic, one.partition) == (topic, partition)]
            starts[topic, partition] = data.draw(st.sampled_from([0, *offsets]))
    report = audited(model.records, starts=starts)
    assert report.clean, report.offences
    removed = {where for where, start in starts.items() if start > 0}
    assert {one.topic for one in report.reach if one.removed} == {topic for topic, _ in removed}


@given(logs)
@thorough
def test_without_tokens_the_rest_is_proven_all_the_same(model: LogModel) -> None:
    report = audited(model.records, AuditOptions(tokens=False))
    assert report.clean, report.offences
    assert "sampled_tokens" not in report.counts


def test_records_may_come_in_any_order() -> None:
    model = LogModel([TaskPlan(sessions=(SessionPlan(), SessionPlan()))], 3).run()
    backwards, forwards = audited(model.records[::-1]), audited(model.records)
    assert msgspec.structs.replace(backwards, seconds=0) == msgspec.structs.replace(forwards, seconds=0)


@pytest.mark.parametrize("topic", views.BY_TOPIC)
def test_views_name_the_fields_and_types_of_the_schema(topic: str) -> None:
    events = {one.__name__: one for one in BY_NAME[topic].values}
    found = {one.__struct_config__.tag: one for one in views.BY_TOPIC[topic]}
    assert set(found) == set(events)
    for name, view in found.items():
        have = {field.encode_name for field in msgspec.structs.fields(events[name])}
        assert {field.encode_name for field in msgspec.structs.fields(view)} <= have, name
