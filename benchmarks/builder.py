"""How fast trajectories are built: unique tokens per second and core, messages included, and in how much memory.

    uv run --extra dev python benchmarks/builder.py [--quick] [--against CHECKOUT]

From encoded records (values of `polar.completions`) to the encoded trajectory: decode, the session's state machine,
merging, assembly, encode. Sessions of 10, 50 and 500 calls (`builder_sessions.py`), written with delta prompts, as the
proxy does, and with whole ones. Beside each strategy stands a plain-Python reading of the paper's formulas
(`builder_paper.py`), whose traces have to hold the same ids as those of `prefix_merging`, the same ones of them
sampled. `kernel` is the merge alone, on arrays that are decoded already: the pool's insertion and the prefixes that it
finds. Takes about four minutes; `--quick` less than half of one. `--against` measures another checkout's builder
besides and compares the bytes where its version is the same.

CPU time of the process, never wall time: the median of all runs, which are made in turns (A B A B …), and the fastest.
A token is unique where it is new after what its prompt begins alike with the call before it, or sampled. Each case is a
process of its own; its peak is the kernel's high-water mark (Linux) less what it was after a first, tiny session;
records are read from a file one by one, as a consumer reads them.

Aims: 3 million per second and core end to end with delta prompts and 500 calls; the kernel alone 50 million ids taken
in per second.
"""

import argparse
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import builder_paper
import numpy as np
from builder_sessions import END, Made, Session, values
from rich.console import Console
from rich.table import Table

from polar.builder import Entry, rebuild
from polar.builder.pool import TokenPool, taken
from polar.schemas import (
    AttemptFenced,
    BuilderSpec,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    PromptBase,
    RecordRef,
    SessionClosed,
    SessionFinal,
    SessionOpened,
    Trajectory,
    decode,
    encode,
)

RECORDS = (
    SessionOpened,
    AttemptFenced,
    CallStarted,
    CompletionCaptured,
    CompletionFailed,
    SessionClosed,
    SessionFinal,
)
SIZES = {10: 7_000, 50: 22_500, 500: 200_000}
"""Calls, and unique tokens, about."""
STRATEGIES = ("prefix_merging", "per_request", "prefix_tree")
PAPER, KERNEL = "paper", "kernel"
NEAREST = 32
"""Earlier calls that the kernel is asked for, as the builder asks."""
RUNS_S = 1.0
"""CPU seconds after which a process makes no further run."""
END_TO_END_AIM, KERNEL_AIM = 3e6, 50e6
SOURCES = ("schemas", "libs", "services/builder", "services/proxy", "services/submit")


class Case(NamedTuple):
    calls: int
    whole: bool
    what: str
    checkout: str = ""
    """Empty: this one."""

    @property
    def file(self) -> str:
        return f"{self.calls}-{'whole' if self.whole else 'delta'}.records"


@dataclass
class Found:
    """Of all runs of a case."""

    cpu_s: list[float] = field(default_factory=list)
    peak: int = 0
    """Bytes."""
    traces: int = 0
    size: int = 0
    """Bytes of the encoded result."""
    digest: str = ""
    checks: str = ""
    """Digest of the traces' ids and of which are sampled."""
    version: str = ""
    """Of the builder."""
    handed: int = 0
    """Ids that the kernel is handed."""

    @property
    def usual(self) -> float:
        return statistics.median(self.cpu_s)


# one process per case -----------------------------------------------------------------------------------------------


def built(path: Path, strategy: str) -> tuple[bytes, Trajectory]:
    """From encoded records to the encoded trajectory."""
    entries = (
        Entry(RecordRef(topic="completions", partition=0, offset=offset), decode(value, RECORDS))
        for offset, value in enumerate(values(path))
    )
    trajectory = rebuild(entries, BuilderSpec(strategy=strategy))
    return encode(trajectory), trajectory


def merged(path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    traces = builder_paper.merge(values(path), END)
    return builder_paper.encode(traces), traces


def checks_of(result: Any) -> str:
    """Digest of ids and of which are sampled, whatever holds them."""
    digest = hashlib.sha256()
    if isinstance(result, Trajectory):
        assert result.error is None, result.error
        for trace in result.traces:
            view = result.view(trace)
            sampled = np.zeros(trace.turns[-1].end, np.int32)
            for turn in trace.turns:
                sampled[turn.start : turn.end] = 1
            for array in (view.prompt_ids, view.response_ids, sampled[trace.prompt_length :]):
                digest.update(array.tobytes())
    else:
        for trace in result:
            for name in ("prompt_ids", "response_ids", "loss_mask"):
                digest.update(np.array(trace[name], np.int32).tobytes())
    return digest.hexdigest()


def kernel(path: Path) -> tuple[Callable[[], int], int]:
    """The merge alone on decoded arrays, and how many ids it is handed."""
    calls: list[tuple[PromptBase | None, Any, str, Any, Any]] = []
    handed = 0
    for value in values(path):
        event = decode(value, RECORDS)
        if isinstance(event, CompletionCaptured):
            prompt, choice = event.prompt, event.choices[0]
            last = None if prompt.base is None else [prompt.base, *prompt.more][-1]
            calls.append((last, prompt.ids.array, event.completion_id, choice.ids.array, choice.logprobs.array))
            handed += len(prompt.ids) + len(choice.ids)

    def run() -> int:
        pool = TokenPool()
        known: dict[str, list[tuple[int, int]]] = {}
        for who, (base, ids, name, sampled, logprobs) in enumerate(calls):
            before = [] if base is None else taken(known[base.completion_id], base.ids)
            spans, place = pool.add_given(before, ids)
            place.replies(NEAREST)
            place.prompts(NEAREST)
            _, known[name] = pool.add_reply(spans, sampled, logprobs, who)
        return pool.size

    return run, handed


def child(folder: Path, file: str, what: str, runs: int) -> None:
    """Measures one case and prints it."""
    if what == KERNEL:
        work, handed = kernel(folder / file)
        print(json.dumps({"cpu_s": _timed(work, runs, RUNS_S), "handed": handed}))
        return
    make: Callable[[Path], tuple[bytes, Any]] = merged if what == PAPER else lambda path: built(path, what)
    make(folder / "first.records")
    gc.collect()
    base, started = _high_water(), time.process_time()
    data, result = make(folder / file)
    first = time.process_time() - started
    peak = _high_water() - base
    found: dict[str, Any] = {
        "peak": peak,
        "traces": len(result if what == PAPER else result.traces),
        "size": len(data),
        "digest": hashlib.sha256(data).hexdigest(),
        "checks": checks_of(result),
        "version": "" if what == PAPER else result.builder_version,
    }
    del data, result
    found["cpu_s"] = [first, *_timed(lambda: make(folder / file), runs - 1, RUNS_S - first)]
    print(json.dumps(found))


def _timed(work: Callable[[], Any], runs: int, seconds: float) -> list[float]:
    found: list[float] = []
    while len(found) < runs and sum(found) < seconds:
        gc.collect()
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return found


def _high_water() -> int:
    """Bytes. `ru_maxrss` would begin at the parent's, since the process was a copy of it once."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel tells no high-water mark")


# the parent -----------------------------------------------------------------------------------------------------------


def measure(folder: Path, case: Case, runs: int) -> dict[str, Any]:
    env = dict(os.environ)
    if case.checkout:
        env["PYTHONPATH"] = os.pathsep.join(str(Path(case.checkout) / one) for one in SOURCES)
    command = [sys.executable, __file__, "--child", str(folder), case.file, case.what, str(runs)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cases(sizes: Iterable[int], against: str | None) -> Iterator[Case]:
    for calls in sizes:
        for whole in (False, True):
            yield Case(calls, whole, PAPER)
            for what in (*STRATEGIES, KERNEL):
                yield Case(calls, whole, what)
                if against is not None:
                    yield Case(calls, whole, what, against)


def written(folder: Path, sizes: Iterable[int]) -> dict[str, Made]:
    """The sessions' files."""
    Session(3, 4_000, whole=False).write(folder / "first.records")
    found = {}
    for calls in sizes:
        for whole in (False, True):
            name = Case(calls, whole, "").file
            found[name] = Session(calls, SIZES[calls], whole=whole).write(folder / name)
    return found


def check(all_found: dict[Case, Found]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for case, found in all_found.items():
        if case.what == KERNEL:
            continue
        if case.what == PAPER:
            mine = all_found[case._replace(what=STRATEGIES[0])]
            if found.checks != mine.checks:
                wrong.append(f"{case.file}: the paper's traces and those of prefix_merging differ")
        other = all_found[case._replace(whole=not case.whole)]
        if case.what != PAPER and found.digest != other.digest:
            wrong.append(f"{case.file}: delta prompts give another trajectory than whole ones by {case.what}")
        mine = all_found[case._replace(checkout="")]
        if found.version == mine.version and found.digest != mine.digest:
            wrong.append(f"{case.file}: the other checkout gives other bytes by {case.what}")
    return wrong


def show(console: Console, made: dict[str, Made], all_found: dict[Case, Found], against: bool) -> None:
    table = Table(title="From encoded records to the encoded trajectory (M: million)", title_justify="left")
    table.add_column("session")
    for name in ("CPU ms", "M unique/s", "fastest", "× paper", *(["× other"] if against else []), "peak MiB", "traces"):
        table.add_column(name, justify="right")
    last = None
    for case, found in all_found.items():
        if case.what == KERNEL or case.checkout:
            continue
        mine, paper = made[case.file], all_found[case._replace(what=PAPER)]
        if case.file != last:
            last = case.file
            prompts = "whole" if case.whole else "delta"
            about = f"{case.calls} calls, {prompts} prompts: {mine.unique:,} unique, {mine.size / 1e6:,.1f} MB"
            table.add_section()
            table.add_row(f"[bold]{about}")
        other = all_found.get(case._replace(checkout=_other(all_found)))
        table.add_row(
            f"  {case.what}",
            f"{found.usual * 1e3:,.1f}",
            f"{mine.unique / found.usual / 1e6:.2f}",
            f"{mine.unique / min(found.cpu_s) / 1e6:.2f}",
            f"{paper.usual / found.usual:.1f}",
            *([f"{other.usual / found.usual:.2f}" if other else ""] if against else []),
            f"{found.peak / 2**20:,.1f}",
            str(found.traces),
        )
    console.print(table)
    _show_kernel(console, made, all_found, against)
    _show_growth(console, made, all_found)


def _other(all_found: dict[Case, Found]) -> str:
    return next((case.checkout for case in all_found if case.checkout), "none")


def _show_kernel(console: Console, made: dict[str, Made], all_found: dict[Case, Found], against: bool) -> None:
    table = Table(title="The merge kernel alone, on decoded arrays", title_justify="left")
    table.add_column("session")
    for name in ("CPU ms", "ids handed over", "M ids/s", "M unique/s", *(["× other"] if against else [])):
        table.add_column(name, justify="right")
    for case, found in all_found.items():
        if case.what != KERNEL or case.checkout:
            continue
        mine, other = made[case.file], all_found.get(case._replace(checkout=_other(all_found)))
        table.add_row(
            f"{case.calls} calls, {'whole' if case.whole else 'delta'} prompts",
            f"{found.usual * 1e3:,.2f}",
            f"{found.handed:,}",
            f"{found.handed / found.usual / 1e6:,.0f}",
            f"{mine.unique / found.usual / 1e6:,.1f}",
            *([f"{other.usual / found.usual:.2f}" if other else ""] if against else []),
        )
    console.print(table)


def _show_growth(console: Console, made: dict[str, Made], all_found: dict[Case, Found]) -> None:
    few, many = list(SIZES)[-2:]
    table = Table(title=f"Growth, {many} calls against {few}: per unique token", title_justify="left")
    for name in ("", "CPU", "peak memory", "bytes of the trajectory"):
        table.add_column(name, justify="right" if name else "left")
    for whole in (False, True):
        for what in (PAPER, *STRATEGIES):
            small, large = Case(few, whole, what), Case(many, whole, what)
            times = made[large.file].unique / made[small.file].unique
            one, other = all_found[small], all_found[large]
            table.add_row(
                f"{what}, {'whole' if whole else 'delta'} prompts",
                f"× {other.usual / one.usual / times:.2f}",
                f"× {other.peak / max(one.peak, 1) / times:.2f}",
                f"× {other.size / one.size / times:.2f}",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, without the shortest session")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", help="another checkout, whose builder is measured too")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, file, what, runs = arguments.child
        child(Path(folder), file, what, int(runs))
        return
    console = Console(width=120)
    rounds, runs = (1, 3) if arguments.quick else (arguments.rounds, 20)
    sizes = list(SIZES)[-2:] if arguments.quick else list(SIZES)
    console.print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds", highlight=False)
    all_found: dict[Case, Found] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = written(folder, sizes)
        for _ in range(rounds):
            for case in cases(sizes, arguments.against):
                answer = measure(folder, case, runs)
                found = all_found.setdefault(case, Found())
                found.cpu_s += answer.pop("cpu_s")
                for field_, value in answer.items():
                    setattr(found, field_, value)
    show(console, made, all_found, arguments.against is not None)
    wrong = check(all_found)
    large = list(SIZES)[-1]
    for strategy in STRATEGIES:
        case = Case(large, False, strategy)
        rate = made[case.file].unique / all_found[case].usual
        if rate < END_TO_END_AIM:
            wrong.append(f"{strategy}: {rate / 1e6:.2f} M unique tokens/s, the aim is {END_TO_END_AIM / 1e6:.0f} M")
    for whole in (False, True):
        case = Case(large, whole, KERNEL)
        rate = all_found[case].handed / all_found[case].usual
        if rate < KERNEL_AIM:
            wrong.append(f"the kernel: {rate / 1e6:.1f} M ids/s, the aim is {KERNEL_AIM / 1e6:.0f} M")
    for one in wrong:
        console.print(f"[red]missed: {one}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
