"""Topics as the table wants them: made where missing, and checked.

Counts are set when a topic is made and never changed by Polar: keys would move. A topic that is not as the table wants
it is an error with its name, the setting, what was found and what was wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiokafka.admin import NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from polar.schemas.topics import TABLE, TopicSpec

from .clients import Clients, stop_admin
from .errors import TopicProblem, TopicsWrong, translate, translated

MISSING = "missing"


async def ensure_topics(clients: Clients, specs: Iterable[TopicSpec] = TABLE) -> list[str]:
    """Makes the topics that are missing and waits until brokers lead them; returns the names made, with prefix.

    Raises:
        BrokerUnavailable: none answers.
        BusError: the broker refuses to make one.
    """
    settings = clients.settings
    admin = await clients.admin()
    try:
        with translated("making topics"):
            present = set(await admin.list_topics())
            wanted = [spec for spec in specs if settings.full(spec.name) not in present]
            if not wanted:
                return []
            response = await admin.create_topics(
                [
                    NewTopic(
                        name=settings.full(spec.name),
                        num_partitions=settings.count(spec),
                        replication_factor=settings.replication_factor,
                        topic_configs=_configs(clients, spec),
                    )
                    for spec in wanted
                ],
                timeout_ms=round(settings.request_timeout_s * 1000),
            )
            for name, code, *message in response.topic_errors:
                error = for_code(code)
                if code and error is not TopicAlreadyExistsError:
                    raise translate(error(*[one for one in message if one]), f"making topic {name}")
            await _led(clients, admin, wanted)
    finally:
        await stop_admin(admin)
    return [settings.full(spec.name) for spec in wanted]


async def check_topics(clients: Clients, specs: Iterable[TopicSpec] = TABLE) -> None:
    """Compares every topic with the table.

    Raises:
        TopicsWrong: with every difference.
        BrokerUnavailable: none answers.
    """
    specs = tuple(specs)

    async def once() -> None:
        admin = await clients.admin()
        try:
            with translated("checking topics"):
                problems = await _differences(clients, admin, specs)
        finally:
            await stop_admin(admin)
        if problems:
            raise TopicsWrong(problems)

    # a broker that has just come back may answer with an empty list for some time
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_only_missing),
        stop=stop_after_delay(3),
        wait=wait_exponential(multiplier=0.2, max=1),
        reraise=True,
    ):
        with attempt:
            await once()


def _only_missing(error: BaseException) -> bool:
    return isinstance(error, TopicsWrong) and all(one.found == MISSING for one in error.problems)


async def _differences(clients: Clients, admin: Any, specs: tuple[TopicSpec, ...]) -> list[TopicProblem]:
    settings = clients.settings
    # all topics, not these by name: asking for a missing one by name makes it, where auto-creation is on
    counts = {one["topic"]: len(one["partitions"]) for one in await admin.describe_topics()}
    present = [spec for spec in specs if settings.full(spec.name) in counts]
    configs = await _described(admin, [settings.full(spec.name) for spec in present])
    problems = [
        TopicProblem(settings.full(spec.name), "topic", MISSING, "to exist") for spec in specs if spec not in present
    ]
    for spec in present:
        name = settings.full(spec.name)
        if counts[name] != settings.count(spec):
            problems.append(TopicProblem(name, "partitions", str(counts[name]), str(settings.count(spec))))
        found = configs.get(name, {})
        for setting, wanted in _configs(clients, spec).items():
            value = found.get(setting)
            if value is not None and not _good(setting, value, wanted):
                least = "" if setting == "cleanup.policy" or wanted == "-1" else " or more"
                problems.append(TopicProblem(name, setting, value, wanted + least))
    return problems


def _good(setting: str, found: str, wanted: str) -> bool:
    """Whether a topic may be so: longer retention and larger records than wanted are an operator's choice."""
    if setting == "cleanup.policy":
        return set(found.replace(" ", "").split(",")) == set(wanted.split(","))
    if setting == "retention.ms":
        return found == "-1" or (wanted != "-1" and int(found) >= int(wanted))
    if setting == "max.message.bytes":
        return int(found) >= int(wanted)
    return True  # sizes of segments and replication are the operator's


def _configs(clients: Clients, spec: TopicSpec) -> dict[str, str]:
    found = spec.config(clients.settings.max_record_bytes)
    if clients.settings.min_insync_replicas is not None:
        found["min.insync.replicas"] = str(clients.settings.min_insync_replicas)
    if not spec.retention_ms and "delete" not in found["cleanup.policy"]:
        # means nothing to a topic that is only compacted
        del found["retention.ms"]
    return found


async def _described(admin: Any, names: list[str]) -> dict[str, dict[str, str]]:
    """Settings by topic."""
    if not names:
        return {}
    answers = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    found: dict[str, dict[str, str]] = {}
    for answer in answers:
        for code, message, _, name, entries, *_ in answer.resources:
            if code:
                raise translate(for_code(code)(message), f"describing topic {name}")
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


async def _led(clients: Clients, admin: Any, specs: list[TopicSpec]) -> None:
    """Waits until every partition has a leader: until then a producer would have to."""
    wanted = {clients.settings.full(spec.name): clients.settings.count(spec) for spec in specs}
    async with asyncio.timeout(clients.settings.request_timeout_s):
        while True:
            described = {one["topic"]: one for one in await admin.describe_topics()}
            led = {
                name: sum(part["leader"] >= 0 for part in described[name]["partitions"])
                for name in wanted
                if name in described
            }
            if all(led.get(name, 0) >= count for name, count in wanted.items()):
                return
            await asyncio.sleep(0.05)
