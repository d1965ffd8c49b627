"""Calls told apart as each harness makes them (facts: measured sessions of the real CLIs), with and without marks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.builder import rebuild
from polar.schemas import BuilderSpec, ClientHints, Label, Sampling, Trajectory
from tests.builder.toy import BEGIN, END, FIRST_PIECE, NEWLINE, ROLES, Message, Reply, Session, system, tool, user

Told = tuple[str, str]
SUMMARY = (
    "<analysis>The user wants a parser.</analysis>\n"
    "<summary>\nThe parser in src/parse.py fails on empty lines.\n</summary>"
)


class Chat:
    """A harness over a tokenizer of whole words."""

    def __init__(self, **config: Any) -> None:
        self.session = Session(builder=BuilderSpec(strategy="per_request", config=config))
        self.words: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        return [self.words.setdefault(one, FIRST_PIECE + len(self.words)) for one in text.split()]

    def call(
        self,
        messages: list[Message],
        answer: str | Message,
        tools: str = "",
        hints: ClientHints | None = None,
        max_tokens: int | None = None,
        **more: Any,
    ) -> Message:
        """Calls the model; its message."""
        message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        prompt = self.ids(tools)
        for one in messages:
            prompt += [BEGIN, ROLES[one["role"]], *self.ids(self.shown(one)), END, NEWLINE]
        prompt += [BEGIN, ROLES["assistant"], NEWLINE]
        self.session.call(
            messages,
            Reply([*self.ids(self.shown(message)), END], message),
            tools=tools,
            prompt=prompt,
            hints=hints or ClientHints(),
            sampling_asked=Sampling(max_tokens=max_tokens),
            **more,
        )
        return message

    def shown(self, message: Message) -> str:
        return (message.get("content") or "") + json.dumps(message.get("tool_calls") or "")

    def told(self) -> list[Told]:
        """Label and what showed it, of each call."""
        trajectory = self.built()
        return [(str(one.label), one.label_by) for one in trajectory.traces]

    def built(self) -> Trajectory:
        self.session.close()
        trajectory = rebuild(self.session.records)
        assert trajectory.error is None, trajectory.error
        return trajectory


def calling(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


MAIN, SIDE, COMPACTION = ("main", ""), ("side", "no_tools"), ("compaction", "summary")


@pytest.fixture
def chat() -> Chat:
    return Chat()


def work(chat: Chat, messages: list[Message], tools: str, **more: Any) -> list[Message]:
    """One step of an agent's: a tool call and its result."""
    return [*messages, chat.call(messages, calling("shell", command="ls -la src"), tools, **more), tool("parse.py")]


def test_claude_code_by_its_marks(chat: Chat) -> None:
    main, agent = ClientHints(session="s"), ClientHints(session="s", subagent="a1", thread="a1")
    messages = [system("You are an agent."), user("Fix the parser.")]
    messages = work(chat, messages, "Bash Agent", hints=main)
    chat.call([system("You explore."), user("Find the tests.")], "tests/test_parse.py", "Bash", hints=agent)
    compaction = ClientHints(session="s", request_kind="compaction")
    chat.call([*messages, user("Respond with text only: a summary.")], SUMMARY, "Bash Agent", hints=compaction)
    fresh = [messages[0], user(f"This session continues from a summary:\n{SUMMARY}")]
    chat.call(fresh, "Done.", "Bash Agent", hints=main)
    marks = [("subagent", "mark:subagent"), ("compaction", "mark:request_kind")]
    assert chat.told() == [MAIN, *marks, ("main", "summary")]


def test_claude_code_compacts_with_its_tools_and_no_mark_of_it(chat: Chat) -> None:
    """Same tools and prefix, an instruction at the end, once more after a tool call; then a start from the summary."""
    messages = work(chat, [system("You are an agent."), user("Fix the parser.")], "Bash")
    asked = [*messages, user("Respond with text only: a summary of the conversation so far.")]
    chat.call(asked, calling("Read", path="src/parse.py"), "Bash")
    chat.call(asked, SUMMARY, "Bash")
    told = SUMMARY.split("</analysis>\n")[1].replace("<summary>", "Summary:").replace("</summary>", "")
    fresh = [messages[0], user(f"This session is being continued from a previous conversation.\n{told}")]
    work(chat, fresh, "Bash")
    assert chat.told() == [MAIN, COMPACTION, COMPACTION, ("main", "summary")]


def test_claude_codes_web_search_is_a_call_beside_it(chat: Chat) -> None:
    messages = [system("You are an agent."), user("Which Python is the newest?")]
    query = "newest stable python release"
    found = chat.call(messages, calling("WebSearch", query=query), "Bash WebSearch")
    chat.call([system("You search."), user(f"Perform a web search for the query: {query}")], "3.14")
    chat.call([*messages, found, tool("3.14")], "3.14", "Bash WebSearch")
    assert chat.told() == [MAIN, SIDE, MAIN]


def test_codex_by_its_marks(chat: Chat) -> None:
    """Threads, `request_kind` and a compaction after which the user's messages stay."""
    turn = ClientHints(session="s", thread="t1", request_kind="turn")
    child = ClientHints(session="s", thread="t2", request_kind="turn", subagent="collab_spawn", parent="t1")
    messages = work(chat, [system("You are Codex."), user("Fix the parser.")], "exec_command", hints=turn)
    work(chat, [system("You are Codex."), user("Look at the tests.")], "exec_command", hints=child)
    kind = ClientHints(session="s", thread="t1", request_kind="compaction")
    chat.call([*messages, user("Write a handoff summary.")], SUMMARY, hints=kind)
    chat.call([*messages[:2], user(f"Handoff:\n{SUMMARY}")], "Done.", "exec_command", hints=turn)
    assert [label for label, _ in chat.told()] == ["main", "subagent", "compaction", "main"]


def test_gemini_cli_has_no_marks_for_its_router_and_its_sub_agents(chat: Chat) -> None:
    """The router: no tools, a schema, first of all. A sub-agent: other instructions, the objective in them."""
    request = user("Fix the parser.")
    chat.call([system("Classify the complexity of the task."), request], '{"score": 40}', constraints=["grammar"])
    messages = [system("You are Gemini CLI."), request]
    objective = "Find out where empty lines are dropped."
    spawn = chat.call(messages, calling("invoke_agent", objective=objective), "run_shell invoke_agent read_file")
    agent = [system(f"You investigate code. Objective: {objective}"), user("Get started!")]
    work(chat, agent, "read_file")
    chat.call([*messages, spawn, tool("In parse.py.")], "Done.", "run_shell invoke_agent read_file")
    assert chat.told() == [SIDE, MAIN, ("subagent", "tool_argument"), MAIN]


def test_qwen_code_compacts_in_a_conversation_of_its_own(chat: Chat) -> None:
    """No tools, another system prompt, the history as text; a sub-agent without a mark; memory after the turn."""
    tools = "shell agent edit read todo"
    messages = work(chat, [system("You are Qwen Code."), user("Fix the parser.")], tools)
    chat.call([system("You summarize conversations."), user("user: Fix the parser. tool: parse.py")], SUMMARY)
    messages = work(chat, [messages[0], user(f"Setup.\n{SUMMARY}")], tools)
    spawn = chat.call(messages, calling("agent", prompt="Check that the tests pass."), tools)
    work(chat, [system("You are a tester."), user("Check that the tests pass.")], "shell read")
    messages = [*messages, spawn, tool("They pass.")]
    chat.call(messages, "All done.", tools)
    work(chat, [system("You extract memories."), user("What is worth keeping?")], "read edit")
    assert chat.told() == [
        MAIN,
        COMPACTION,
        ("main", "summary"),
        ("main", "summary"),
        ("subagent", "tool_argument"),
        ("main", "summary"),
        ("side", "after_the_turn"),
    ]


def test_opencodes_title_may_come_before_its_first_turn(chat: Chat) -> None:
    chat.call([system("You write titles."), user("Fix the parser.")], "Parser fix")
    messages = work(chat, [system("You are opencode."), user("Fix the parser.")], "bash task")
    child = ClientHints(session="s2", parent="s1", thread="s2")
    work(chat, [system("You are opencode."), user("Look around.")], "bash", hints=child)
    chat.call([*messages, user("Summarize what was done.")], SUMMARY)
    chat.call([messages[0], user("What did we do?"), user(SUMMARY)], "Done.", "bash task")
    assert chat.told() == [SIDE, MAIN, ("subagent", "mark:parent"), COMPACTION, ("main", "summary")]


def test_pi_mini_and_openhands_have_one_conversation(chat: Chat) -> None:
    messages = [system("You are pi."), user("Fix the parser.")]
    for _ in range(3):
        messages = work(chat, messages, "read bash edit write")
    assert chat.told() == [MAIN] * 3


def test_aider_makes_a_new_prompt_each_time_and_has_no_tools(chat: Chat) -> None:
    """One call per message, greedy, the files in the prompt changing under the same instructions."""
    for files in ("a = 1", "a = 2", "a = 3"):
        chat.call([system("Act as an expert developer."), user(files), user("Increment a.")], "SEARCH a REPLACE b")
    assert chat.told() == [MAIN] * 3


def test_a_reply_that_the_next_prompt_quotes_is_no_summary(chat: Chat) -> None:
    """aider puts the files as edited into the next prompt."""
    edit = "def increment(a):\n    return a + 1  # by one"
    chat.call([system("Act as an expert developer."), user("a = 1"), user("Write increment.")], edit)
    chat.call([system("Act as an expert developer."), user(edit), user("Document it.")], "done and documented")
    assert chat.told() == [MAIN] * 2


def test_a_probe_is_told_by_how_little_it_asks_for(chat: Chat) -> None:
    chat.call([user("quota")], "ok", max_tokens=1)
    messages = [system("You are an agent."), user("Fix the parser.")]
    reply = chat.call(messages, "Which one?", max_tokens=32_000)
    chat.call([*messages, reply, user("All.")], "Done.", max_tokens=32_000)
    assert chat.told() == [("side", "probe"), MAIN, MAIN]


def test_a_question_on_top_of_the_conversation_without_tools_is_aside(chat: Chat) -> None:
    messages = work(chat, [system("You are an agent."), user("Fix the parser.")], "Bash")
    chat.call([*messages, user("Suggest the user's next prompt.")], "run the tests")
    chat.call(messages, "Done.", "Bash")
    assert chat.told() == [MAIN, SIDE, MAIN]


def test_a_last_word_without_tools_is_the_conversations_own(chat: Chat) -> None:
    """What harnesses ask for when the steps are used up."""
    messages = work(chat, [system("You are an agent."), user("Fix the parser.")], "Bash")
    chat.call([*messages, user("No steps are left: say what you did.")], "I fixed it.")
    assert chat.told() == [MAIN, MAIN]


def test_a_second_conversation_of_the_same_agent_is_main(chat: Chat) -> None:
    work(chat, [system("You are an agent."), user("Fix the parser.")], "Bash")
    work(chat, [system("You are an agent."), user("Now the printer.")], "Bash")
    assert chat.told() == [MAIN, MAIN]


def test_a_program_of_several_agents_trains_them_all(chat: Chat) -> None:
    """A planner and a worker with tools of their own, in turns: nothing speaks against either."""
    plan = chat.call([system("You plan."), user("Build a shop.")], "First the cart.", "plan_tool")
    work(chat, [system("You work."), user("The cart, please.")], "shell edit")
    chat.call([system("You plan."), user("Build a shop."), plan, user("Done.")], "Then the till.", "plan_tool")
    assert [label for label, _ in chat.told()] == ["main"] * 3


def test_marks_alone_where_structure_is_not_wanted() -> None:
    chat = Chat(label_by="marks")
    chat.call([system("You write titles."), user("Fix the parser.")], "Parser fix")
    work(chat, [system("You are opencode."), user("Fix the parser.")], "bash")
    chat.call([user("x")], "y", hints=ClientHints(request_kind="title"))
    assert chat.told() == [MAIN, MAIN, ("side", "mark:request_kind")]


def test_which_labels_train_and_which_are_rewarded_is_set_apart() -> None:
    chat = Chat(train_labels=["main", "side"], reward_labels=["main"])
    chat.call([system("You write titles."), user("Fix the parser.")], "Parser fix")
    work(chat, [system("You are opencode."), user("Fix the parser.")], "bash")
    found = {one.label: (one.trainable, one.rewarded) for one in chat.built().traces}
    assert found == {Label.SIDE: (True, False), Label.MAIN: (True, None)}
