"""What builders make of sessions that real coding CLIs had: the tables of docs/sessions.md.

    python -m tests.harness_sessions DIR [--update docs/sessions.md]

DIR holds a folder for each chat template, with what the harness suite leaves of its sessions in it:

    POLAR_TEST_RECORDS_DIR=DIR/qwen3 POLAR_TEST_CHAT_TEMPLATE=… pytest tests/harness

A page holds the tables between `<!-- made sessions -->` and `<!-- /made -->`. Each session is built by every built-in
strategy, by the public interface of `polar.builder`, and `prefix_merging` once more with the engine's tokenizer named.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

import polar.devmodel
from polar.builder import Entry, rebuild
from polar.builder.texts import Tokenizers
from polar.client.files import read_values
from polar.schemas import (
    BuilderSpec,
    CallStarted,
    ClientHints,
    CompletionCaptured,
    CompletionFailed,
    Context,
    Label,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Trajectory,
    decode,
)
from tests.harness.adapters import ADAPTERS
from tests.harness_tables import MADE

STRATEGIES = ("per_request", "prefix_merging", "prefix_tree")
WHAT = {"task-live": "task", "agent": "sub-agent", "compaction": "compaction"}
"""Sessions of the suite that are shown; its others are these again, or one call long."""
TOKENIZER = Path(polar.devmodel.__file__).parent / "data" / "tokenizer.json"
EVENTS = (SessionOpened, CallStarted, CompletionCaptured, CompletionFailed, SessionClosed, SessionFinal)


@dataclass(frozen=True)
class Built:
    """One session under one template, built by each strategy."""

    cli: str
    template: str
    what: str
    trajectories: dict[str, Trajectory]
    decoded: Trajectory
    """By `prefix_merging` with the tokenizer named."""
    unmarked: Trajectory
    """By `per_request`, with the harness's marks left out."""

    @property
    def merged(self) -> Trajectory:
        return self.trajectories["prefix_merging"]


def records(path: Path) -> list[Entry]:
    """A session as a builder reads it."""
    events = (decode(value, EVENTS) for value in read_values(path))
    return [Entry(RecordRef(topic="completions", partition=0, offset=at), one) for at, one in enumerate(events)]


def built(folder: Path) -> Iterator[Built]:
    """Every session in `folder`, by harness and template."""
    digest = hashlib.sha256(TOKENIZER.read_bytes()).hexdigest()
    told = BuilderSpec(config={"tokenizer": digest})
    tokenizers = Tokenizers([TOKENIZER])
    for cli in ADAPTERS:
        for template in sorted(one for one in folder.iterdir() if one.is_dir()):
            for file, what in WHAT.items():
                path = template / f"{cli.name}-{file}.msgpack"
                if not path.exists():
                    continue
                session = records(path)
                trajectories = {name: rebuild(session, BuilderSpec(strategy=name)) for name in STRATEGIES}
                decoded = rebuild(session, told, tokenizers=tokenizers)
                for one in (*trajectories.values(), decoded):
                    if one.error is not None:
                        raise RuntimeError(f"{path.name} of {template.name}: {one.error.message}")
                unmarked = rebuild([_unmarked(one) for one in session], BuilderSpec(strategy="per_request"))
                yield Built(cli.name, template.name, what, trajectories, decoded, unmarked)


def _unmarked(entry: Entry) -> Entry:
    if not isinstance(entry.event, CompletionCaptured):
        return entry
    return Entry(entry.ref, replace(entry.event, hints=ClientHints()))


def traces_table(sessions: Sequence[Built]) -> str:
    lines = [
        "| harness | template | calls | `per_request` | `prefix_tree` | `prefix_merging` | of the task | merged "
        "| breaks | retokenized |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cli, template in dict.fromkeys((one.cli, one.template) for one in sessions):
        own = [one for one in sessions if (one.cli, one.template) == (cli, template)]
        calls = sum(one.merged.captured for one in own)
        traces = [sum(len(one.trajectories[name].traces) for one in own) for name in STRATEGIES]
        task = next((_main(one.merged) for one in own if one.what == "task"), "")
        merges = sum(sum(one.merged.statistics().merges.values()) for one in own)
        broken = _breaks(one.merged for one in own)
        steps = merges + sum(broken.values())
        rate = f"{merges} of {steps}" if steps else "-"
        per_request, merging, tree = traces
        lines.append(
            f"| {cli} | {template} | {calls} | {per_request} | {tree} | {merging} | {task} | {rate} "
            f"| {_counted(broken)} | {_retokenized(one.merged for one in own)} |"
        )
    return "\n".join(lines)


def labels_table(sessions: Sequence[Built]) -> str:
    lines = ["| harness | session | calls by label, and what showed it | set aside |", "|---|---|---|---|"]
    for cli, what in dict.fromkeys((one.cli, one.what) for one in sessions):
        own = [one for one in sessions if (one.cli, one.what) == (cli, what)]
        told = dict.fromkeys((_labels(one.merged), _counted(_aside(one.merged))) for one in own)
        for labels, aside in told:
            lines.append(f"| {cli} | {what} | {labels} | {aside} |")
    return "\n".join(lines)


def agreement(sessions: Sequence[Built]) -> str:
    other = [f"{one.cli} {one.what} ({one.template})" for one in sessions if _shape(one.merged) != _shape(one.decoded)]
    with_ = f"With the tokenizer named, `prefix_merging` makes the same traces of {len(sessions) - len(other)} of the "
    return f"{with_}{len(sessions)} sessions" + (f"; others of {', '.join(other)}." if other else ".")


def structure(sessions: Sequence[Built]) -> str:
    """How calls would be told apart if no harness marked any."""
    wrong: Counter[str] = Counter()
    for one in sessions:
        told = {trace.turns[0].completion_id: trace.label for trace in one.trajectories["per_request"].traces}
        for trace in one.unmarked.traces:
            label = told[trace.turns[0].completion_id]
            if trace.label is not label:
                wrong[f"{one.cli} {label} (taken for {trace.label})"] += 1
    calls = sum(one.merged.captured for one in sessions)
    right = calls - sum(wrong.values())
    rest = f"; other labels: {_counted(wrong)}" if wrong else ""
    return f"Without the marks, structure alone gives {right} of the {calls} calls the same label{rest}."


def _main(trajectory: Trajectory) -> str:
    """Calls in each main trace."""
    turns = [len({turn.completion_id for turn in one.turns}) for one in trajectory.traces if one.label is Label.MAIN]
    return " + ".join(map(str, turns))


def _breaks(trajectories: Iterable[Trajectory]) -> Counter[str]:
    found: Counter[str] = Counter()
    for trace in (trace for one in trajectories for trace in one.traces):
        if trace.break_reason:
            found[trace.break_reason + (f" ({trace.break_detail})" if trace.break_detail else "")] += 1
    return found


def _labels(trajectory: Trajectory) -> str:
    found: Counter[str] = Counter()
    for trace in trajectory.traces:
        by = f" ({trace.label_by})" if trace.label_by else ""
        found[f"{trace.label}{by}"] += len({turn.completion_id for turn in trace.turns})
    return _counted(found)


def _aside(trajectory: Trajectory) -> Counter[str]:
    return Counter(one.reason for one in trajectory.set_aside)


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "-"


def _retokenized(trajectories: Iterable[Trajectory]) -> str:
    """Share of the trained tokens whose context is not the engine's, token for token."""
    found: Counter[Context] = Counter()
    for trace in (trace for one in trajectories for trace in one.traces if trace.trainable):
        for turn in trace.turns:
            if turn.trainable:
                found[turn.context] += turn.end - turn.start
    whole = sum(found.values())
    return f"{found[Context.RETOKENIZED] / whole:.0%} of {whole}" if whole else "-"


def _shape(trajectory: Trajectory) -> list[tuple[list[str], str | None]]:
    return [([turn.completion_id for turn in one.turns], one.break_reason) for one in trajectory.traces]


def page_part(sessions: Sequence[Built]) -> str:
    return "\n\n".join([traces_table(sessions), agreement(sessions), labels_table(sessions), structure(sessions)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--update", type=Path, metavar="PAGE")
    asked = parser.parse_args()
    made = page_part(list(built(asked.dir)))
    if asked.update is None:
        print(made)
        return
    page = asked.update.read_text()
    asked.update.write_text(MADE.sub(lambda found: f"{found[1]}\n{made}\n\n{found[3]}", page))


if __name__ == "__main__":
    main()
