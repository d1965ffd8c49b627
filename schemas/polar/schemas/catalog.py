"""Every name a task may use, and whether this version has it.

A name that the design knows and this installation lacks is `not_available`, which tells a user more than "unknown".
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    name: str
    built: bool
    """Part of this version."""
    extra: str
    """The optional dependency group that brings it."""
    summary: str
    own_box: bool = False
    """An evaluator that works in the session's own box."""


class Kind(NamedTuple):
    """One kind of plug-in."""

    noun: str
    entries: tuple[Entry, ...]
    aliases: dict[str, str]

    def resolve(self, name: str) -> Entry | None:
        """The entry of a name or an alias."""
        canonical = self.aliases.get(name, name)
        return next((one for one in self.entries if one.name == canonical), None)

    def names(self, *, built: bool = True) -> list[str]:
        return [one.name for one in self.entries if one.built or not built]


HARNESSES = Kind(
    "harness",
    (
        Entry("shell", True, "gateway", "any command"),
        Entry("claude_code", False, "gateway", "Claude Code"),
        Entry("codex", False, "gateway", "OpenAI Codex CLI"),
        Entry("gemini_cli", False, "gateway", "Gemini CLI"),
        Entry("qwen_code", False, "gateway", "Qwen Code"),
        Entry("opencode", False, "gateway", "opencode"),
        Entry("pi", False, "gateway", "pi"),
        Entry("mini_swe_agent", False, "gateway", "mini-SWE-agent"),
        Entry("openhands", False, "gateway", "OpenHands"),
    ),
    {
        "claude-code": "claude_code",
        "gemini-cli": "gemini_cli",
        "qwen-code": "qwen_code",
        "mini-swe-agent": "mini_swe_agent",
    },
)
BACKENDS = Kind(
    "backend",
    (
        Entry("local", True, "gateway", "bubblewrap on this machine"),
        Entry("docker", False, "gateway", "a Docker engine"),
        Entry("apptainer", False, "gateway", "Apptainer"),
    ),
    {},
)
BUILDERS = Kind(
    "builder",
    (
        Entry("prefix_merging", True, "builder", "one trace per chain of calls (the paper, section 3.4.2)"),
        Entry("per_request", True, "builder", "one trace per call"),
        Entry("prefix_tree", True, "builder", "exact traces that say where they branch off each other"),
    ),
    {},
)
EVALUATORS = Kind(
    "evaluator",
    (
        Entry("session_completed", True, "evaluator", "1 if the session completed, else 0"),
        Entry("command", True, "evaluator", "a check run in the session's box", own_box=True),
        Entry("test_on_output", False, "evaluator", "parsed test results against expected ones"),
        Entry("swebench_harness", False, "evaluator", "SWE-bench's own grading"),
        Entry("harbor", False, "evaluator", "a Harbor task's verifier"),
        Entry("judge", False, "evaluator", "a language model as judge"),
    ),
    {"session_completion": "session_completed"},
)
NETWORKS = ("proxy-only", "none", "host", "bridge")
PREPARE_TYPES = ("upload_file", "upload_dir", "exec")
MCP_TRANSPORTS = ("stdio", "sse", "streamable-http")
