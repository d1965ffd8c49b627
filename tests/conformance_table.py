"""The table of a conformance suite in a page of the docs, made of what the suite did.

    pytest tests/broker --junitxml suite.xml && python -m tests.conformance_table docs/broker.md suite.xml

A page names its suite and its columns, and holds the table between two comments:

    <!-- conformance of tests/broker: embedded = Embedded broker, kafka = Apache Kafka -->
    <!-- /conformance -->

A test belongs to the column whose name its first parameter has (`test_x[kafka-gzip]`). A row is a test function, named
by what it says; a cell tells how all its cases went. Several reports are read as one.
"""

import ast
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPELLING = {
    "aiokafkas": "aiokafka's",
    "json": "JSON",
    "librdkafkas": "librdkafka's",
    "pythons": "python's",
    "vllms": "vLLM's",
}
MARKER = re.compile(r"<!-- conformance of (?P<suite>\S+): (?P<columns>.*?) -->\n.*?<!-- /conformance -->", re.DOTALL)


@dataclass
class Cell:
    """How the cases of one test went on one subject."""

    counts: Counter[str] = field(default_factory=Counter)
    skipped_because: str = ""

    def __str__(self) -> str:
        total = self.counts.total()
        if not total:
            return "–"
        if self.counts["failed"]:
            return f"**no** ({self.counts['failed']} of {total} cases)"
        if self.counts["skipped"] == total:
            return f"not run: {self.skipped_because}"
        cases = f" ({total} cases)" if total > 1 else ""
        return f"yes{cases}" if not self.counts["skipped"] else f"yes ({self.counts['passed']} of {total} cases run)"


@dataclass
class Suite:
    """What a page's comment says, and the rows: module, test function, column."""

    folder: str
    columns: dict[str, str]
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)

    @classmethod
    def of(cls, page: str) -> "Suite":
        """Raises `ValueError` when the page has no such comment."""
        found = MARKER.search(page)
        if found is None:
            raise ValueError("the page has no <!-- conformance of … --> and <!-- /conformance -->")
        columns = dict(re.split(r"\s*=\s*", each.strip(), maxsplit=1) for each in found["columns"].split(","))
        return cls(found["suite"], columns)

    def read(self, report: Path) -> None:
        for case in ET.parse(report).getroot().iter("testcase"):
            module = case.get("classname", "").replace(".", "/")
            name, _, parameters = case.get("name", "").partition("[")
            column = self._column(parameters.rstrip("]"))
            if not module.startswith(f"{self.folder}/") or column is None:
                continue
            cell = self.cells.setdefault((module, name, column), Cell())
            skipped = case.find("skipped")
            if skipped is not None:
                cell.counts["skipped"] += 1
                cell.skipped_because = skipped.get("message", "")
            else:
                bad = case.find("failure") is not None or case.find("error") is not None
                cell.counts["failed" if bad else "passed"] += 1

    def _column(self, parameters: str) -> str | None:
        fitting = [each for each in self.columns if parameters == each or parameters.startswith(f"{each}-")]
        return max(fitting, key=len, default=None)

    def markdown(self) -> str:
        tests = list(dict.fromkeys((module, name) for module, name, _ in self.cells))
        lines = [f"| behaviour | {' | '.join(self.columns.values())} |", "|---" * (len(self.columns) + 1) + "|"]
        for module in dict.fromkeys(module for module, _ in tests):
            lines.append(f"| **{heading(ROOT / f'{module}.py')}** |{' |' * len(self.columns)}")
            for name in [name for other, name in tests if other == module]:
                cells = [str(self.cells.get((module, name, column), Cell())) for column in self.columns]
                lines.append(f"| {sentence(name)} | {' | '.join(cells)} |")
        return "\n".join(lines)


def heading(module: Path) -> str:
    """What a test module is about: the first line of its docstring, less where it runs."""
    text = ast.get_docstring(ast.parse(module.read_text())) or module.stem
    return text.splitlines()[0].partition(", on ")[0].rstrip(".")


def sentence(name: str) -> str:
    """What a test's name says."""
    words = " ".join(SPELLING.get(word, word) for word in name.removeprefix("test_").split("_"))
    return words[0].upper() + words[1:]


def rewritten(page: str, reports: Iterable[Path]) -> str:
    """The page with its table made anew."""
    suite = Suite.of(page)
    for report in reports:
        suite.read(report)

    def with_table(found: re.Match[str]) -> str:
        comment = found.group(0).partition("-->")[0]
        return f"{comment}-->\n\n{suite.markdown()}\n\n<!-- /conformance -->"

    return MARKER.sub(with_table, page)


if __name__ == "__main__":
    target, *given = map(Path, sys.argv[1:])
    target.write_text(rewritten(target.read_text(), given))
