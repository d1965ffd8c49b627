"""The APIs the broker speaks: a table from api key to versions and handler.

Version ranges are those that kio's structs (from Apache Kafka 4) and the handlers have in common. Left out on
purpose: the group protocol of KIP-848, fetching and producing by topic id, and transactions of version 2, none of
which is negotiated by a client that is told these ranges.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polar.broker.handlers.context import Parts, RequestContext
from polar.broker.handlers.groups import GroupHandlers
from polar.broker.handlers.records import RecordHandlers
from polar.broker.handlers.topics import TopicHandlers
from polar.broker.handlers.transactions import TransactionHandlers

__all__ = ["API_VERSIONS", "PRODUCE", "Api", "api_table"]

PRODUCE, API_VERSIONS = 0, 18

Handler = Callable[[Any, RequestContext], Awaitable[Mapping[str, Any] | None]]


class Api(NamedTuple):
    """Versions `first` to `last` are handled; `advertised` is the first one that clients are told."""

    first: int
    last: int
    handler: Handler
    advertised: int | None = None


def api_table(parts: Parts, discard: Callable[[Path], None]) -> dict[int, Api]:
    """Handlers by api key. `discard` takes the directories of deleted topics."""
    records = RecordHandlers(parts)
    topics = TopicHandlers(parts, discard)
    groups = GroupHandlers(parts)
    transactions = TransactionHandlers(parts)
    table: dict[int, Api] = {}

    async def api_versions(request: Any, context: RequestContext) -> Mapping[str, Any]:
        return {
            "api_keys": [
                {
                    "api_key": key,
                    "min_version": api.first if api.advertised is None else api.advertised,
                    "max_version": api.last,
                }
                for key, api in sorted(table.items())
            ]
        }

    table |= {
        # librdkafka takes a broker without produce 0 to 2 for one without compression, so Apache Kafka 4 says 0 too.
        PRODUCE: Api(3, 11, records.produce, advertised=0),
        1: Api(4, 12, records.fetch),
        2: Api(1, 7, records.list_offsets),
        3: Api(0, 12, topics.metadata),
        8: Api(2, 8, groups.offset_commit),
        9: Api(1, 8, groups.offset_fetch),
        10: Api(0, 4, groups.find_coordinator),
        11: Api(0, 9, groups.join_group),
        12: Api(0, 4, groups.heartbeat),
        13: Api(0, 5, groups.leave_group),
        14: Api(0, 5, groups.sync_group),
        15: Api(0, 5, groups.describe_groups),
        16: Api(0, 5, groups.list_groups),
        API_VERSIONS: Api(0, 3, api_versions),
        19: Api(2, 7, topics.create_topics),
        20: Api(1, 6, topics.delete_topics),
        21: Api(0, 2, records.delete_records),
        22: Api(0, 4, transactions.init_producer_id),
        23: Api(2, 4, records.offset_for_leader_epoch),
        24: Api(0, 3, transactions.add_partitions_to_txn),
        25: Api(0, 3, transactions.add_offsets_to_txn),
        26: Api(0, 3, transactions.end_txn),
        28: Api(0, 3, groups.txn_offset_commit),
        32: Api(1, 4, topics.describe_configs),
        33: Api(0, 2, topics.alter_configs),
        35: Api(1, 4, topics.describe_log_dirs),
        37: Api(0, 3, topics.create_partitions),
        42: Api(0, 2, groups.delete_groups),
        44: Api(0, 1, topics.incremental_alter_configs),
        47: Api(0, 0, groups.offset_delete),
        60: Api(0, 1, topics.describe_cluster),
        61: Api(0, 0, records.describe_producers),
        65: Api(0, 0, transactions.describe_transactions),
        66: Api(0, 1, transactions.list_transactions),
    }
    return table
