"""The proxy: harnesses' model calls on one side, vLLM on the other, every call captured on the log before it is told.

Stateless: what a replica remembers, it has from `polar.control` and may forget.
"""

from .service import ProxyService
from .settings import ProxySettings

__all__ = ["ProxyService", "ProxySettings"]
