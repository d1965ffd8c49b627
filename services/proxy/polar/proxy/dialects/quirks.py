"""What particular harnesses send beside their provider's API, and what is done about it.

One table: harness, the version in which it was seen, the reason, and the test that shows it. What is not here is passed
on as it came; text of a prompt is changed only where a row says so, because the prompt is what the model is trained on.
How calls are told apart is in `marks`. Pure data and lookups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """One habit of one harness."""

    name: str
    harness: str
    version: str
    """In which it was seen, or where it was read of."""
    sends: str
    done: str
    reason: str
    test: str
    """The function that shows it, in `tests/proxy/test_*_quirks.py`."""
    cuts: re.Pattern[str] | None = None
    """Cut from the beginning of a system text."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Roles of messages, and what they are taken for."""


QUIRKS = (
    Quirk(
        name="billing line",
        harness="claude-code",
        version="2.1.329",
        sends="a text `x-anthropic-billing-header: cc_version=…; cc_entrypoint=…;` at the head of the system prompt",
        done="cut; its `cc_is_subagent=true` becomes a mark",
        reason="its hash is of the first user text (of each request in older versions): it breaks prefixes and caches, "
        "and is meant for a biller, not a model",
        test="test_the_billing_line_does_not_reach_the_prompt",
        cuts=re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)"),
    ),
    Quirk(
        name="moving cache marks",
        harness="claude-code",
        version="2.1.329",
        sends="`cache_control` on the last message of each request only, and a content that is a list of one text with "
        "it and a string without",
        done="marks are left out, one text is a string",
        reason="the same message would differ from turn to turn",
        test="test_cache_marks_and_one_text_lists_make_no_difference",
    ),
    Quirk(
        name="system messages in the conversation",
        harness="claude-code",
        version="2.1.329",
        sends="`role: system` as messages[1] (environment, skills, deferred tools), for known models with "
        "`output_config`",
        done="left where it is; folded into the user message before it only where the engine's template refuses it",
        reason="moving it to the front would change the head of every later prompt",
        test="test_a_system_message_stays_where_it_was_sent",
    ),
    Quirk(
        name="roles ctx and msg",
        harness="claude-code",
        version="reported of newer versions; not in 2.1.329",
        sends="messages of the roles `ctx` and `msg`",
        done="taken for `system` and `user`",
        reason="refusing them would end the session; the mapping follows their names and is not measured",
        test="test_reported_roles_are_taken_for_known_ones",
        roles={"ctx": "system", "msg": "user"},
    ),
    Quirk(
        name="deferred tools",
        harness="claude-code",
        version="2.1.329",
        sends="tools with `defer_loading`, among them DeferredToolPlaceholder; after ToolSearch they come without it, "
        "or as `tool_reference` in its result",
        done="not shown to the model before they are referred to",
        reason="that is what the field says; the placeholder's own text asks never to be called",
        test="test_a_deferred_tool_is_shown_once_it_is_referred_to",
    ),
    Quirk(
        name="day's date",
        harness="claude-code",
        version="2.1.329",
        sends="today's date in the first messages",
        done="nothing",
        reason="it is fixed when a session begins, so it breaks no prefix within one, and it is part of what the model "
        "was shown",
        test="test_a_date_in_the_prompt_is_left_alone",
    ),
    Quirk(
        name="re-serialized arguments",
        harness="claude-code",
        version="2.1.329",
        sends="a tool call's input as an object of its own making (1.0 comes back as 1)",
        done="written as models write it, with a space after colons and commas",
        reason="the dialect's shape is an object; only numbers' spelling is lost, which drift shows",
        test="test_arguments_come_back_as_models_write_them",
    ),
    Quirk(
        name="results as they come",
        harness="claude-code",
        version="2.1.329",
        sends="the results of calls that ran side by side in the order in which they ended",
        done="told in the order of their calls",
        reason="many chat templates show results without ids, so the model would take one call's result for another's",
        test="test_results_stand_in_the_order_of_their_calls",
    ),
    Quirk(
        name="thoughts left out",
        harness="gemini-cli",
        version="0.61.0",
        sends="a history without thoughts; signatures of other parts as they came",
        done="the thinking travels in the signature of the first text and of the first call",
        reason="the next prompt would not have what the model thought",
        test="test_thoughts_that_are_left_out_come_back_in_signatures",
    ),
    Quirk(
        name="signatures of its own",
        harness="gemini-cli",
        version="0.61.0",
        sends="`skip_thought_signature_validator` as the signature of a call that has none",
        done="passed over, and not counted as another provider's thinking",
        reason="it stands for no thinking",
        test="test_a_signature_of_the_clients_own_is_passed_over",
    ),
    Quirk(
        name="prefixed call ids",
        harness="gemini-cli",
        version="0.61.0",
        sends="a call's id with the function's name and two underscores before it",
        done="the prefix is cut",
        reason="the call would have another id in the history than it was captured with",
        test="test_the_prefix_of_a_call_id_is_cut",
    ),
    Quirk(
        name="responses without ids",
        harness="gemini-cli",
        version="0.61.0",
        sends="function responses without the id of their call, in the order of the calls",
        done="each answers the first open call of its name",
        reason="a tool message names its call",
        test="test_responses_without_ids_answer_calls_in_order",
    ),
    Quirk(
        name="base prompt as an item",
        harness="codex",
        version="0.169.0",
        sends="no `instructions`: its base prompt is input[0], role developer, and more developer messages follow",
        done="system messages, each left where it is",
        reason="a chat template knows no developer; moving them would change the head of every later prompt",
        test="test_developer_items_are_system_messages_in_their_place",
    ),
    Quirk(
        name="client metadata",
        harness="codex",
        version="0.169.0",
        sends="`client_metadata` with its keys in another order each time, and "
        "`internal_chat_message_metadata_passthrough` with times in items",
        done="left out",
        reason="the same history would differ from turn to turn; the headers say the same",
        test="test_client_metadata_makes_no_difference",
    ),
    Quirk(
        name="tools by namespace",
        harness="codex",
        version="0.169.0",
        sends="sub-agents and MCP servers as tools of a `namespace`, and takes calls only with it (`unsupported call`)",
        done="functions `NAMESPACE__NAME`; a call of one is told with its namespace",
        reason="chat templates know functions only",
        test="test_a_tool_of_a_namespace_is_called_by_its_namespace",
    ),
    Quirk(
        name="tools inside the input",
        harness="codex",
        version="0.169.0, with models from gpt-5.6 on",
        sends="no `tools`, but an item `additional_tools`",
        done="offered like the others",
        reason="chat templates take tools at the prompt's head only",
        test="test_tools_of_an_item_are_offered_like_the_others",
    ),
    Quirk(
        name="WebSocket first",
        harness="codex",
        version="0.169.0, with its built-in provider",
        sends="`GET /v1/responses` with an upgrade",
        done="426",
        reason="at 426 it goes on with POST at once, at 404 it tries seven times",
        test="test_a_websocket_is_told_to_post",
    ),
    Quirk(
        name="deaf to comments",
        harness="codex",
        version="0.169.0",
        sends="nothing; its idle timer of 300 s is not reset by SSE comments",
        done="keep-alives are `response.in_progress` events",
        reason="an event of the API's own is known to every client",
        test="test_keep_alives_are_events_of_the_api",
    ),
    Quirk(
        name="deaf to comments, too",
        harness="qwen-code",
        version="0.24.4",
        sends="nothing; its idle timer of 240 s is not reset by SSE comments",
        done="every eighth keep-alive is an empty chunk",
        reason="chunks without content are known to every client, but not every client likes many",
        test="test_some_keep_alives_are_chunks",
    ),
    Quirk(
        name="memory agent",
        harness="qwen-code",
        version="0.24.4",
        sends="after some turns, calls of an agent that looks for what to remember, on top of the conversation",
        done="marked as `side`; `memory.enableManagedAutoMemory: false` in its settings ends them",
        reason="they are no part of the task",
        test="test_the_memory_agent_is_marked",
    ),
    Quirk(
        name="compact arguments",
        harness="qwen-code",
        version="0.24.4; opencode 1.18.33 and pi 0.87.1 alike",
        sends="a call's arguments as JSON of its own making, without spaces (1.0 comes back as 1)",
        done="nothing",
        reason="engines parse arguments before they render them, so the prompt is the same but for numbers, which "
        "drift shows",
        test="test_arguments_are_passed_on_as_they_came",
    ),
    Quirk(
        name="thoughts without spaces",
        harness="qwen-code",
        version="0.24.4",
        sends="`reasoning_content` without the spaces and newlines around it",
        done="nothing",
        reason="templates that show earlier thinking strip it too; with others drift shows it",
        test="test_thoughts_are_passed_on_as_they_came",
    ),
    Quirk(
        name="system prompt as a developer's",
        harness="pi",
        version="0.87.1",
        sends="its system prompt with the role developer, for models that reason",
        done="taken for the system's",
        reason="a chat template knows no developer",
        test="test_a_developer_message_is_the_systems",
    ),
    Quirk(
        name="late ends as items",
        harness="langchain-openai",
        version="1.7.3, streaming",
        sends="an empty message, or the sealed reasoning once more, after a reply's calls: it takes an item that is "
        "closed after another has begun for two",
        done="left out where it says nothing new of the reply before it",
        reason="items are closed when all is captured, so late; the empty message would be a turn of its own",
        test="test_an_item_that_a_late_end_was_made_of_is_left_out",
    ),
    Quirk(
        name="item ids of its own",
        harness="copilot",
        version="1.0.102",
        sends="items with other ids than they were told with",
        done="a reply's items are joined by their order",
        reason="the message must come back as it was captured",
        test="test_items_with_foreign_ids_are_joined_by_their_order",
    ),
)

SKIPPED_SIGNATURES = ("skip_thought_signature_validator", "context_engineering_is_the_way_to_go")
"""What clients of Google's write where a signature is asked for and they have none."""
IS_SUBAGENT = re.compile(r"\bcc_is_subagent=true\b")


def cut_system(text: str) -> tuple[str, dict[str, str]]:
    """A system text without what is cut from it, and the marks found in the cut."""
    marks: dict[str, str] = {}
    for quirk in QUIRKS:
        found = None if quirk.cuts is None else quirk.cuts.match(text)
        if found is not None:
            if IS_SUBAGENT.search(found.group()):
                marks["subagent"] = "true"
            text = text[found.end() :]
    return text, marks


def known_role(role: object) -> object:
    """The role that a message's role is taken for."""
    return next((quirk.roles[role] for quirk in QUIRKS if isinstance(role, str) and role in quirk.roles), role)


def in_call_order(blocks: Sequence[Json], called: Sequence[str]) -> list[tuple[int, Json]]:
    """A user's blocks (Anthropic's) with their numbers; results side by side stand in the order of their calls."""
    order = {identity: place for place, identity in enumerate(called)}

    def place(item: tuple[int, Json]) -> int:
        return order.get(str(item[1].get("tool_use_id")), len(order))

    found: list[tuple[int, Json]] = []
    for results, run in groupby(enumerate(blocks), key=lambda item: item[1].get("type") == "tool_result"):
        side_by_side = list(run)
        found += sorted(side_by_side, key=place) if results else side_by_side
    return found


def bare_call_id(name: str, identity: str) -> str:
    """A tool call's id as it was told, without the prefix that gemini-cli gives it."""
    return identity.removeprefix(f"{name.strip() or 'generic_tool'}__")
