"""The tables of the conformance suites have a row for every test, and no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance_table import rewritten, sentence

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.broker.test_records" name="test_acks[kafka-docker-1]"/>
<testcase classname="tests.broker.test_records" name="test_acks[kafka-docker-all]"><failure message="no"/></testcase>
<testcase classname="tests.broker.test_records" name="test_acks[kafka-1]"><skipped message="none here"/></testcase>
<testcase classname="tests.broker.test_records" name="test_acks[kafka-all]"><skipped message="none here"/></testcase>
<testcase classname="tests.broker.test_records" name="test_acks[embedded-1]"/>
<testcase classname="tests.broker.test_records" name="test_acks[embedded-all]"><skipped message="slow"/></testcase>
<testcase classname="tests.broker.test_cores" name="test_something_else"/>
</testsuite></testsuites>"""


def conformance_tests(folder: str, fixtures: set[str]) -> set[str]:
    """Test functions that ask for the subject of a suite."""
    found = set()
    for module in (ROOT / folder).glob("test_*.py"):
        tree = ast.parse(module.read_text())
        if "Embedded only" in (ast.get_docstring(tree) or ""):
            continue
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found |= {
            each.name
            for each in functions
            if each.name.startswith("test_") and fixtures & {argument.arg for argument in each.args.args}
        }
    return found


@pytest.mark.parametrize(
    ("page", "folder", "fixtures"),
    [("broker.md", "tests/broker", {"cluster", "own"}), ("engines.md", "tests/devmodel", {"engine"})],
)
def test_a_table_has_a_row_for_every_conformance_test(page: str, folder: str, fixtures: set[str]) -> None:
    table = (ROOT / "docs" / page).read_text().partition("<!-- conformance of ")[2]
    shown = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    rows = {row for row in shown if not row.startswith("**") and row != "behaviour"}
    assert rows == {sentence(name) for name in conformance_tests(folder, fixtures)}, f"docs/{page} says how to make it"


def test_a_row_tells_how_all_cases_of_a_test_went(tmp_path: Path) -> None:
    report = tmp_path / "suite.xml"
    report.write_text(REPORT)
    comment = "<!-- conformance of tests/broker: embedded = E, kafka = K, kafka-docker = D -->"
    page = f"before\n{comment}\nold\n<!-- /conformance -->\nafter"
    made = rewritten(page, [report])
    assert "| Acks | yes (1 of 2 cases run) | not run: none here | **no** (1 of 2 cases) |" in made
    assert "something else" not in made
    assert made.startswith(f"before\n{comment}\n")
    assert made.endswith("\n<!-- /conformance -->\nafter")
    assert rewritten(made, [report]) == made
