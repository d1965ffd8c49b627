"""Log lines are small, safe and readable by machines."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
from pydantic import SecretStr

from polar.schemas import BoxAccess, Claim, Logprobs, TokenIds
from polar.service.logs import shorten


def line(**values: Any) -> dict[str, Any]:
    return shorten(None, "info", dict(values))


def test_token_arrays_bytes_and_long_lists_are_told_by_their_size() -> None:
    assert line(ids=TokenIds([1, 2, 3])) == {"ids": "TokenIds(<3 values>)"}
    assert line(logprobs=Logprobs([0.5])) == {"logprobs": "Logprobs(<1 values>)"}
    assert line(raw=b"12345") == {"raw": "<5 bytes>"}
    assert line(found=list(range(1000))) == {"found": "<1000 items>"}
    assert line(found=[1, b"x"]) == {"found": [1, "<1 bytes>"]}
    assert line(array=np.zeros((2, 3))) == {"array": "<array (2, 3) float64>"}
    assert len(line(text="x" * 100_000)["text"]) < 5000


def test_secrets_are_masked_also_inside() -> None:
    assert line(api_key="k", token="t", tokens=5, authorization="Bearer x", harmless="h") == {
        "api_key": "***",
        "token": "***",
        "tokens": 5,
        "authorization": "***",
        "harmless": "h",
    }
    assert line(env={"OPENAI_API_KEY": "k", "box_key": "k", "A": "1"})["env"]["box_key"] == "***"
    assert "hidden" not in str(line(value=SecretStr("hidden")))


def test_events_are_told_by_what_identifies_them() -> None:
    assert line(box=BoxAccess(url="u", key="k")) == {"box": {"type": "BoxAccess"}}
    assert line(claim=Claim(sha256="x", size=1, uri="u")) == {"claim": {"type": "Claim"}}


PROGRAM = """
import logging
from polar.service.logs import bound, configure_logs, get_logger
configure_logs("info", "auto")
log = get_logger("polar.demo")
with bound(session="s1", attempt=2):
    log.info("worked", count=3, key="secret")
    logging.getLogger("aiohttp.server").warning("foreign %s", "words")
log.debug("unseen")
logging.getLogger("aiokafka").error('Unable connect to "%s"', "x")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def test_outside_a_terminal_lines_are_json_on_stderr_with_what_was_bound() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    worked, foreign, failed = [json.loads(text) for text in done.stderr.splitlines()]
    assert worked["event"] == "worked"
    assert (worked["session"], worked["attempt"], worked["count"], worked["key"]) == ("s1", 2, 3, "***")
    assert (worked["level"], worked["logger"]) == ("info", "polar.demo")
    assert (foreign["event"], foreign["session"], foreign["level"]) == ("foreign words", "s1", "warning")
    assert "ZeroDivisionError" in failed["exception"]
