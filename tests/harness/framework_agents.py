"""Small agents over agent frameworks, one command each: `python framework_agents.py NAME INSTRUCTION`.

Runs in a box, in a virtual environment that has the frameworks and nothing of Polar's. Addresses and keys come from
the variables that a gateway sets; each framework is used as its own documentation begins.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

MODEL = os.environ["POLAR_MODEL"]
TOLD = "You mend code. Use the tool."


def run(command: str) -> str:
    """Run a shell command; its output."""
    done = subprocess.run(command, shell=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return f"{done.stdout}[exit {done.returncode}]"


async def langchain(model: Any, instruction: str) -> str:
    from langchain.agents import create_agent

    agent = create_agent(model, tools=[run], system_prompt=TOLD)
    said = await agent.ainvoke({"messages": [{"role": "user", "content": instruction}]})
    return str(said["messages"][-1].text)


async def langchain_openai(instruction: str) -> str:
    from langchain_openai import ChatOpenAI

    return await langchain(ChatOpenAI(model=MODEL), instruction)


async def langchain_responses(instruction: str) -> str:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, use_responses_api=True, streaming=True)
    return await langchain(model, instruction)


async def langchain_responses_sealed(instruction: str) -> str:
    from langchain_openai import ChatOpenAI

    asked: dict[str, Any] = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    model = ChatOpenAI(model=MODEL, use_responses_api=True, streaming=True, store=False, **asked)
    return await langchain(model, instruction)


async def langchain_anthropic(instruction: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return await langchain(ChatAnthropic(model_name=MODEL, streaming=True), instruction)


async def langchain_google(instruction: str) -> str:
    from langchain_google_genai import ChatGoogleGenerativeAI

    url = os.environ["GOOGLE_GEMINI_BASE_URL"]
    return await langchain(ChatGoogleGenerativeAI(model=MODEL, base_url=url, streaming=True), instruction)


async def openai_agents(instruction: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="mender", instructions=TOLD, model=MODEL, tools=[function_tool(run)])
    return str((await Runner.run(agent, instruction)).final_output)


async def openai_agents_chat(instruction: str) -> str:
    from agents import set_default_openai_api

    set_default_openai_api("chat_completions")
    return await openai_agents(instruction)


async def claude_agent_sdk(instruction: str) -> str:
    from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool

    @tool("run", "Run a shell command; its output.", {"command": str})
    async def ran(arguments: dict[str, Any]) -> dict[str, Any]:
        text = await asyncio.to_thread(run, arguments["command"])
        return {"content": [{"type": "text", "text": text}]}

    options = ClaudeAgentOptions(
        model=MODEL,
        system_prompt=TOLD,
        tools=[],
        mcp_servers={"box": create_sdk_mcp_server("box", tools=[ran])},
        allowed_tools=["mcp__box__run"],
    )
    said = ""
    async for message in query(prompt=instruction, options=options):
        if isinstance(message, ResultMessage):
            said = message.result or message.subtype
    return said


AGENTS: dict[str, Callable[[str], Awaitable[str]]] = {
    agent.__name__: agent
    for agent in (
        langchain_openai,
        langchain_responses,
        langchain_responses_sealed,
        langchain_anthropic,
        langchain_google,
        openai_agents,
        openai_agents_chat,
        claude_agent_sdk,
    )
}

if __name__ == "__main__":
    print(asyncio.run(AGENTS[sys.argv[1]](sys.argv[2])))
