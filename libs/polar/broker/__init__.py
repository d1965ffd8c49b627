"""A single-node Kafka broker for one machine: it speaks the Kafka protocol and keeps what it acknowledged.

It knows nothing of the rest of this project; Apache Kafka takes its place by a change of address. Start it as a
process with `spawn` (or `python -m polar.broker`), or inside a loop with `Broker`.
"""

from typing import TYPE_CHECKING, Any

from polar.broker.process import BrokerProcess, spawn, spawn_sync

if TYPE_CHECKING:
    from polar.broker.broker import Broker
    from polar.broker.settings import BrokerSettings

__all__ = ["Broker", "BrokerProcess", "BrokerSettings", "spawn", "spawn_sync"]


def __getattr__(name: str) -> Any:
    # Whoever only spawns a broker need not import its codecs.
    if name == "Broker":
        from polar.broker.broker import Broker

        return Broker
    if name == "BrokerSettings":
        from polar.broker.settings import BrokerSettings

        return BrokerSettings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
