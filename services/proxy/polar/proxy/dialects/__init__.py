"""One module per dialect, each pure translation: a request's bytes to a `Call`, a `Reply` to a body or events."""

from .anthropic import AnthropicMessages
from .base import Counting, Dialect, Limits, StreamEncoder, Told
from .google import GoogleGenerate
from .openai_chat import OpenAIChat
from .responses import OpenAIResponses

__all__ = [
    "AnthropicMessages",
    "Counting",
    "Dialect",
    "GoogleGenerate",
    "Limits",
    "OpenAIChat",
    "OpenAIResponses",
    "StreamEncoder",
    "Told",
]
