"""The gateway: takes assigned attempts through INIT, READY and RUN on one node, and keeps their boxes for grading."""

from .service import GatewayService
from .settings import GatewaySettings

__all__ = ["GatewayService", "GatewaySettings"]
