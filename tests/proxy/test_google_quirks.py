"""The quirks of Gemini CLI: each row of the table has a test of its own here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.proxy.dialects.google.signatures import Kept, sign
from polar.proxy.dialects.quirks import QUIRKS
from tests.proxy.google_harness import USER
from tests.proxy.test_anthropic_replies import made
from tests.proxy.test_google_replies import call, reply, sent_back, whole
from tests.proxy.test_google_requests import answer, messages, model, parse, used, user

MINE = [quirk for quirk in QUIRKS if quirk.harness == "gemini-cli"]


@pytest.mark.parametrize("quirk", MINE, ids=lambda quirk: quirk.name)
def test_every_quirk_has_its_test_and_its_reason(quirk: Any) -> None:
    assert callable(globals()[quirk.test])
    assert quirk.reason
    assert quirk.version


def test_thoughts_that_are_left_out_come_back_in_signatures() -> None:
    for rest in ({"content": "Yes."}, {"content": None, "tool_calls": [made("look", '{"a": 1}')]}):
        said = {"reasoning": "Hm.", **rest}
        content = whole(call(), reply(said))["candidates"][0]["content"]
        content["parts"] = [part for part in content["parts"] if not part.get("thought")]
        assert sent_back(content) == {"role": "assistant", **said}


def test_a_signature_of_the_clients_own_is_passed_over() -> None:
    part = {**used(id="1"), "thoughtSignature": "skip_thought_signature_validator"}
    asked = parse(contents=[*USER, model(part), user(answer(id="1"))])
    assert asked.dropped == ()
    assert "reasoning" not in asked.messages[1]
    # beside one of ours on the text it changes nothing
    signed = {"text": "I look.", "thoughtSignature": sign(Kept(reasoning="Hm."))}
    assert messages(*USER, model(signed, part), user(answer(id="1")))[1]["reasoning"] == "Hm."


def test_the_prefix_of_a_call_id_is_cut() -> None:
    found = messages(*USER, model(used(id="look__call-1")), user(answer(id="look__call-1")))
    assert found[1]["tool_calls"][0]["id"] == found[2]["tool_call_id"] == "call-1"
    assert messages(*USER, model(used(id="other__1")), user(answer()))[1]["tool_calls"][0]["id"] == "other__1"


def test_responses_without_ids_answer_calls_in_order() -> None:
    found = messages(*USER, model(used(id="1"), used(id="2")), user(answer(output="a"), answer(output="b")))
    assert [(message["tool_call_id"], message["content"]) for message in found[2:]] == [("1", "a"), ("2", "b")]
    assert json.dumps(found).count("look") == 2
