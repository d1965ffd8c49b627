"""The six coding CLIs: for each, what a user sets so that it works in a box, and the tools by which it acts.

`launch` is what a gateway's adapter does (`polar.gateway.harness`); the rest is what the scripted model has to say to
this CLI, and how the CLI ends. All of it is measured with the version named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from polar.gateway.harness import Launch, Session
from tests.harness.place import Ran

Json = dict[str, Any]
HOME = "/polar/home"


class Adapter(Protocol):
    """One harness. Tool calls are `{name, arguments}` as the scripted engine's `Reply.tool_calls` takes them."""

    name: ClassVar[str]
    version: ClassVar[str]
    variable: ClassVar[str]
    """The environment variable that names the program; unset: its tests are skipped by this name."""
    command: ClassVar[str]
    package: ClassVar[str]
    """Where it comes from, without the version."""
    dialect: ClassVar[str]
    """As recorded."""
    agent: ClassVar[str]
    """In its User-Agent."""
    tells_session: ClassVar[bool]
    """Whether each call names the harness's session."""
    loses: ClassVar[frozenset[str]]
    """What a message of the model lacks when it comes back: see `test_tasks.LOSSES`."""
    patience: ClassVar[tuple[int | None, int]]
    """Seconds without headers, and of silence after them, until it gives up and asks again. None: for ever."""
    knobs: ClassVar[str]
    """What changes them."""

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch: ...

    def words(self, ran: Ran) -> str:
        """The last words that it told its user."""
        ...

    def usage(self, ran: Ran) -> tuple[int, int]:
        """Prompt and reply tokens of the main agent's calls, by its own count."""
        ...

    def shell(self, command: str) -> Json: ...

    def write(self, path: str, text: str) -> Json: ...

    def read(self, path: str) -> Json: ...

    def delegate(self, prompt: str) -> Json | None:
        """A call that starts a sub-agent; None: it has none."""
        ...


@dataclass(frozen=True)
class Program:
    """Where an installed program lies, and what a box must see of the machine to run it."""

    path: str

    @property
    def folders(self) -> list[str]:
        """Shown to boxes: the `node_modules` it was installed in."""
        return [str(each) for each in Path(self.path).parents if each.name == "node_modules"][-1:]

    @property
    def search(self) -> list[str]:
        """In front of PATH: a Node.js installed beside it (`npm install node@22`) wins over the system's."""
        return [str(Path(self.path).parent)]


def program(adapter: Adapter | type[Adapter]) -> Program | None:
    """The program that the adapter's variable names."""
    named = os.environ.get(adapter.variable)
    return Program(os.path.abspath(named)) if named else None


def _path(adapter: Adapter) -> str:
    found = program(adapter)
    return adapter.command if found is None else found.path


def _json(value: Json) -> bytes:
    return json.dumps(value, indent=2).encode()


def _lines(text: str) -> list[Json]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


class ClaudeCode(Adapter):
    name = "claude-code"
    version = "2.1.329"
    variable = "CLAUDE_CODE_CLI"
    command = "claude"
    package = "@anthropic-ai/claude-code"
    dialect = "anthropic.messages"
    agent = "claude-cli"
    tells_session = True
    loses: ClassVar[frozenset[str]] = frozenset()
    patience = (360, 300)
    knobs = "`API_FORCE_IDLE_TIMEOUT=0`, `CLAUDE_STREAM_IDLE_TIMEOUT_MS`"

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        return Launch(
            command=[
                *(_path(self), "-p", told.instruction, "--model", told.model, "--output-format", "json"),
                *("--permission-mode", "bypassPermissions", *more),
            ],
            # ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are the gateway's
            env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        )

    def words(self, ran: Ran) -> str:
        return str(json.loads(ran.out)["result"])

    def usage(self, ran: Ran) -> tuple[int, int]:
        usage = json.loads(ran.out)["usage"]
        return usage["input_tokens"], usage["output_tokens"]

    def shell(self, command: str) -> Json:
        return {"name": "Bash", "arguments": {"command": command, "description": "As asked"}}

    def write(self, path: str, text: str) -> Json:
        return {"name": "Write", "arguments": {"file_path": path, "content": text}}

    def read(self, path: str) -> Json:
        return {"name": "Read", "arguments": {"file_path": path}}

    def delegate(self, prompt: str) -> Json | None:
        asked = {"description": "As asked", "prompt": prompt, "subagent_type": "general-purpose"}
        return {"name": "Agent", "arguments": asked}


class Codex(Adapter):
    name = "codex"
    version = "0.169.0"
    variable = "CODEX_CLI"
    command = "codex"
    package = "@openai/codex"
    dialect = "openai.responses"
    agent = "codex_exec"
    tells_session = True
    loses: ClassVar[frozenset[str]] = frozenset()
    patience = (None, 300)
    knobs = "`stream_idle_timeout_ms` of the provider"

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        config = f"""\
model = {json.dumps(told.model)}
model_provider = "polar"
web_search = "disabled"

[model_providers.polar]
name = "Polar"
base_url = "{told.base_url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
        return Launch(
            command=[
                *(_path(self), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
                *("--json", "--disable", "plugins", *more, told.instruction),
            ],
            files={f"{HOME}/.codex/config.toml": config.encode()},
            stdin=b"",
        )

    def words(self, ran: Ran) -> str:
        items = [event["item"] for event in _lines(ran.out) if event.get("type") == "item.completed"]
        return str([item["text"] for item in items if item.get("type") == "agent_message"][-1])

    def usage(self, ran: Ran) -> tuple[int, int]:
        usage = _lines(ran.out)[-1]["usage"]
        return usage["input_tokens"], usage["output_tokens"]

    def shell(self, command: str) -> Json:
        # spelled as no client would, so that only its very bytes match
        return {"name": "exec_command", "arguments": f'{{"cmd":  {json.dumps(command)}}}'}

    def write(self, path: str, text: str) -> Json:
        return self.shell(f"cat > {path} <<'END'\n{text}END")

    def read(self, path: str) -> Json:
        return self.shell(f"cat {path}")

    def delegate(self, prompt: str) -> Json | None:
        return {"name": "multi_agent_v1__spawn_agent", "arguments": {"message": prompt}}


class GeminiCli(Adapter):
    name = "gemini-cli"
    version = "0.61.0"
    variable = "GEMINI_CLI"
    command = "gemini"
    package = "@google/gemini-cli"
    dialect = "google.generate_content"
    agent = "GeminiCLI"
    tells_session = False
    loses: ClassVar[frozenset[str]] = frozenset()
    patience = (60, 300)
    knobs = "`GEMINI_EXP`, a file with flag 45773134"
    settings: ClassVar[Json] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        return Launch(
            command=[
                *(_path(self), "-p", told.instruction, "--yolo", "--output-format", "json", "-m", told.model),
                *more,
            ],
            env={"GEMINI_CLI_NO_RELAUNCH": "true"},
            files={f"{HOME}/.gemini/settings.json": _json(self.settings)},
        )

    def words(self, ran: Ran) -> str:
        return str(json.loads(ran.out)["response"])

    def usage(self, ran: Ran) -> tuple[int, int]:
        (model,) = json.loads(ran.out)["stats"]["models"].values()
        return model["tokens"]["prompt"], model["tokens"]["candidates"] + model["tokens"]["thoughts"]

    def shell(self, command: str) -> Json:
        return {"name": "run_shell_command", "arguments": {"command": command, "description": "As asked"}}

    def write(self, path: str, text: str) -> Json:
        return {"name": "write_file", "arguments": {"file_path": path, "content": text}}

    def read(self, path: str) -> Json:
        return {"name": "read_file", "arguments": {"file_path": path}}

    def delegate(self, prompt: str) -> Json | None:
        return {"name": "invoke_agent", "arguments": {"agent_name": "generalist", "prompt": prompt}}


class QwenCode(Adapter):
    name = "qwen-code"
    version = "0.24.4"
    variable = "QWEN_CODE_CLI"
    command = "qwen"
    package = "@qwen-code/qwen-code"
    dialect = "openai.chat"
    agent = "QwenCode"
    tells_session = False
    loses: ClassVar[frozenset[str]] = frozenset({"spelling", "spaces", "emptiness"})
    patience = (120, 240)
    knobs = "`QWEN_CODE_API_TIMEOUT_MS`, `QWEN_STREAM_IDLE_TIMEOUT_MS`"
    settings: ClassVar[Json] = {
        "privacy": {"usageStatisticsEnabled": False},
        # else an agent looks for what to remember after some turns, beside the task and on the model's time
        "memory": {"enableManagedAutoMemory": False},
    }

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        return Launch(
            command=[
                *(_path(self), "-p", told.instruction, "--yolo", "--auth-type", "openai"),
                # as one JSON text, what is over 64 KiB is lost where it ends before a pipe is read
                *("--output-format", "stream-json", *more),
            ],
            env={"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1"},
            files={f"{HOME}/.qwen/settings.json": _json(self.settings)},
        )

    def words(self, ran: Ran) -> str:
        return str(_lines(ran.out)[-1]["result"])

    def usage(self, ran: Ran) -> tuple[int, int]:
        usage = _lines(ran.out)[-1]["usage"]
        return usage["input_tokens"], usage["output_tokens"]

    def shell(self, command: str) -> Json:
        asked = {"command": command, "description": "As asked", "is_background": False}
        return {"name": "run_shell_command", "arguments": asked}

    def write(self, path: str, text: str) -> Json:
        return {"name": "write_file", "arguments": {"file_path": path, "content": text}}

    def read(self, path: str) -> Json:
        return {"name": "read_file", "arguments": {"file_path": path}}

    def delegate(self, prompt: str) -> Json | None:
        asked = {"description": "As asked", "prompt": prompt, "subagent_type": "general-purpose"}
        return {"name": "agent", "arguments": asked}


class Opencode(Adapter):
    name = "opencode"
    version = "1.18.33"
    variable = "OPENCODE_CLI"
    command = "opencode"
    package = "opencode-ai"
    dialect = "openai.chat"
    agent = "opencode"
    tells_session = True
    loses: ClassVar[frozenset[str]] = frozenset({"spelling", "emptiness"})
    patience = (300, 300)
    knobs = "`headerTimeout`, `chunkTimeout` of the provider's options"

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        config = {
            "model": f"polar/{told.model}",
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {
                "polar": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{told.base_url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
                    "models": {
                        told.model: {
                            "tool_call": True,
                            "reasoning": True,
                            "limit": {"context": 131_072, "output": 32_000},
                        }
                    },
                }
            },
        }
        off = ("MODELS_FETCH", "AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
        return Launch(
            command=[_path(self), "run", "--format", "json", *more],
            env={f"OPENCODE_DISABLE_{name}": "1" for name in off},
            files={f"{HOME}/.config/opencode/opencode.json": _json(config)},
            stdin=told.instruction.encode(),  # as an argument it arrives in quotes
        )

    def words(self, ran: Ran) -> str:
        return str([event["part"]["text"] for event in _lines(ran.out) if event["type"] == "text"][-1])

    def usage(self, ran: Ran) -> tuple[int, int]:
        steps = [event["part"]["tokens"] for event in _lines(ran.out) if event["type"] == "step_finish"]
        return sum(one["input"] for one in steps), sum(one["output"] + one["reasoning"] for one in steps)

    def shell(self, command: str) -> Json:
        return {"name": "bash", "arguments": {"command": command, "description": "As asked"}}

    def write(self, path: str, text: str) -> Json:
        return {"name": "write", "arguments": {"filePath": path, "content": text}}

    def read(self, path: str) -> Json:
        return {"name": "read", "arguments": {"filePath": path}}

    def delegate(self, prompt: str) -> Json | None:
        asked = {"description": "As asked", "prompt": prompt, "subagent_type": "general"}
        return {"name": "task", "arguments": asked}


class Pi(Adapter):
    name = "pi"
    version = "0.87.1"
    variable = "PI_CLI"
    command = "pi"
    package = "@earendil-works/pi-coding-agent"
    dialect = "openai.chat"
    agent = "^pi "
    tells_session = False
    loses: ClassVar[frozenset[str]] = frozenset({"spelling", "emptiness"})
    patience = (300, 300)
    knobs = "`httpIdleTimeoutMs` in `settings.json`"

    def launch(self, told: Session, *, more: Sequence[str] = ()) -> Launch:
        models = {
            "providers": {
                "polar": {
                    "baseUrl": f"{told.base_url}/v1",
                    "api": "openai-completions",
                    "apiKey": "$OPENAI_API_KEY",
                    "models": [{"id": told.model, "reasoning": True, "contextWindow": 131_072, "maxTokens": 32_000}],
                }
            }
        }
        return Launch(
            command=[
                *(_path(self), "-p", "--mode", "json", "--provider", "polar", "--model", told.model, "--no-session"),
                *(*more, told.instruction),
            ],
            env={"PI_OFFLINE": "1"},
            files={f"{HOME}/.pi/agent/models.json": _json(models)},
        )

    def words(self, ran: Ran) -> str:
        ends = [event["message"] for event in _lines(ran.out) if event["type"] == "message_end"]
        return "".join(part["text"] for part in ends[-1]["content"] if part["type"] == "text")

    def usage(self, ran: Ran) -> tuple[int, int]:
        ends = [event["message"] for event in _lines(ran.out) if event["type"] == "message_end"]
        told = [message["usage"] for message in ends if message["role"] == "assistant"]
        return sum(one["input"] for one in told), sum(one["output"] for one in told)

    def shell(self, command: str) -> Json:
        return {"name": "bash", "arguments": {"command": command}}

    def write(self, path: str, text: str) -> Json:
        return {"name": "write", "arguments": {"path": path, "content": text}}

    def read(self, path: str) -> Json:
        return {"name": "read", "arguments": {"path": path}}

    def delegate(self, prompt: str) -> Json | None:
        return None


ADAPTERS: tuple[Adapter, ...] = (ClaudeCode(), Codex(), GeminiCli(), QwenCode(), Opencode(), Pi())
BY_NAME: Mapping[str, Adapter] = {each.name: each for each in ADAPTERS}
