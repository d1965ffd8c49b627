"""`demo.html`: what the demo has shown, in one file with no outside resources, for light and dark screens.

Pure: data in, a page out. Everything that a model or a person wrote is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from polar.schemas import Trajectory

from ..output import visible
from .insight import Built, Change, Example, Token, invented, read_again

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --text: #1c1d20; --quiet: #6b6e76; --line: #dcdde1; --card: #fff;
  --one: #1a7f4b; --one-soft: #d5f0e0; --zero: #b3402e; --zero-soft: #f9ded9; --given: #8b8e97; --wrong: #7a3cc2;
  --p3: #d3efdf; --p2: #f6efc4; --p1: #fbdfc0; --p0: #f8d2cd; }
@media (prefers-color-scheme: dark) { :root { --page: #131417; --text: #e8e9ec; --quiet: #9a9da6; --line: #2f3138;
  --card: #1b1c20; --one: #5fd39a; --one-soft: #1c3d2c; --zero: #f0897a; --zero-soft: #46241f; --given: #7f828c;
  --wrong: #c79bff; --p3: #1d4431; --p2: #4a431a; --p1: #553a1b; --p0: #57261f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .3rem; }
p { margin: .3rem 0 .9rem; max-width: 46rem; }
.quiet, caption { color: var(--quiet); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.15rem;
  overflow-x: auto; }
.group { display: grid; grid-template-columns: 9rem repeat(8, minmax(3.4rem, 1fr)); gap: .35rem; align-items: stretch;
  margin: .35rem 0; }
.name { align-self: center; } .name small { display: block; color: var(--quiet); }
.cell { border-radius: 7px; text-align: center; padding: .3rem .1rem; font-variant-numeric: tabular-nums; }
.cell b { display: block; font-size: 1.05rem; } .cell small { font-size: .78rem; }
.good { background: var(--one-soft); color: var(--one); } .bad { background: var(--zero-soft); color: var(--zero); }
.none { background: var(--line); color: var(--quiet); }
.tokens { font: 15px/2 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.tokens span { border-radius: 3px; padding: .12em 0; } .given { color: var(--given); }
.p3 { background: var(--p3); } .p2 { background: var(--p2); } .p1 { background: var(--p1); }
.p0 { background: var(--p0); }
.masked { text-decoration: line-through; }
.changed { box-shadow: inset 0 -3px 0 var(--wrong); }
.key span { font: 13px ui-monospace, monospace; padding: .15em .45em; margin-right: .7em; border-radius: 3px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: .85rem; }
td, th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .right { text-align: right; }
code { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { font: 14px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0; white-space: pre-wrap; }
.piece { border: 1px solid var(--line); border-radius: 4px; padding: 0 .3em; margin-right: .25em; white-space: pre;
  font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.piece small { color: var(--quiet); }
.bar { display: flex; height: 15px; border-radius: 4px; overflow: hidden; margin: 4px 0; background: var(--line); }
.bar i { background: var(--given); opacity: .38; } .bar i.t { background: var(--one); opacity: 1; }
.strategy { margin: 0 0 1rem; }
footer { margin-top: 3rem; color: var(--quiet); font-size: .88rem; }
"""


@dataclass(frozen=True)
class Group:
    """A finished group: its sessions by sample, and their advantages by session id."""

    name: str
    title: str
    trajectories: list[Trajectory]
    advantages: dict[str, float | None]
    after_s: float


@dataclass(frozen=True)
class Findings:
    """All that the page tells. `facts`: short lines for its head; `commands`: what to type next."""

    facts: list[str]
    groups: list[Group]
    example: Example | None
    built: list[Built]
    commands: list[str]


def page(found: Findings) -> str:
    """The whole document."""
    parts = [
        "<h1>Polar: what the demo captured</h1>",
        f'<p class="quiet">{" · ".join(escape(fact) for fact in found.facts)}</p>',
        _groups(found.groups),
    ]
    if found.example is not None:
        parts += [_trace(found.example), _changes(found.example)]
    if found.built:
        parts.append(_built(found.built))
    parts.append(_next(found.commands))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Polar demo</title>'
        f"<style>{STYLE}</style></head><body>\n{body}\n"
        "<footer>Written by <code>polar demo</code>; this file needs nothing from elsewhere.</footer></body></html>\n"
    )


def _groups(groups: Sequence[Group]) -> str:
    rows = "".join(_group(one) for one in groups)
    return (
        "<h2>Groups: rewards and advantages</h2><p>Each task ran as a group of sessions, each in a box of its own. "
        "A session's advantage is its reward less the group's mean, over the group's standard deviation.</p>"
        f'<div class="card">{rows}</div>'
    )


def _group(group: Group) -> str:
    rewards = [one.reward for one in group.trajectories if one.reward is not None]
    mean = f"mean {sum(rewards) / len(rewards):.2f}" if rewards else "no reward"
    cells = []
    for one in group.trajectories:
        advantage = group.advantages.get(one.session_id)
        kind = "none" if one.reward is None else "good" if one.reward > 0 else "bad"
        reward = "–" if one.reward is None else f"{one.reward:g}"
        told = "–" if advantage is None else f"{advantage:+.2f}"
        hint = escape(f"sample {one.sample}, session {one.session_id}, {one.captured} calls")
        cells.append(f'<div class="cell {kind}" title="{hint}"><b>{reward}</b><small>{told}</small></div>')
    head = f'<div class="name">{escape(group.name)}<small>{mean}, {group.after_s:.0f} s</small></div>'
    return f'<div class="group" title="{escape(group.title)}">{head}{"".join(cells)}</div>'


def _trace(example: Example) -> str:
    one = example.trajectory
    reward = "none" if one.reward is None else f"{one.reward:g}"
    told = (
        f"Session <code>{escape(one.session_id)}</code>: {one.captured} calls, reward {reward}, "
        f"{example.trained} trained tokens. Hover over a token for its id and probability."
    )
    wrong = (
        f" <b>{example.changed} of them</b> are other ids when the transcript's text is tokenized again: a trainer "
        "that works from the text would train on tokens that the policy never sampled, with probabilities that are not "
        "theirs."
        if example.changed
        else ""
    )
    if example.invented:
        wrong += f" {escape(invented(example.invented))}"
    key = (
        '<p class="key quiet"><span class="given">given</span><span class="p3">p ≥ 0.9</span>'
        '<span class="p2">≥ 0.5</span><span class="p1">≥ 0.1</span><span class="p0">&lt; 0.1</span>'
        '<span class="p3 changed">re-tokenized otherwise</span><span class="given changed">never sampled</span></p>'
    )
    tokens = "".join(_token(token) for token in example.tokens)
    return f'<h2>One trace, token by token</h2><p>{told}{wrong}</p>{key}<div class="card tokens">{tokens}</div>'


def _token(token: Token) -> str:
    text = visible(token.text)
    if token.logprob is None:
        kind = "given changed" if token.invented else "given"
        return f'<span class="{kind}" title="id {token.id}, given">{escape(text)}</span>'
    probability = math.exp(min(token.logprob, 0.0))
    shade = next(name for least, name in ((0.9, "p3"), (0.5, "p2"), (0.1, "p1"), (-1.0, "p0")) if probability >= least)
    classes = [shade, *(["changed"] if token.changed else []), *([] if token.trained else ["masked"])]
    told = f"id {token.id}, p = {probability:.3f}, log p = {token.logprob:.3f}"
    return f'<span class="{" ".join(classes)}" title="{told}">{escape(text)}</span>'


def _changes(example: Example) -> str:
    if not example.changes:
        return ""
    rows = "".join(
        f"<tr><td>{one.turn}</td><td>{_pieces(one.sampled)}</td><td>{_pieces(one.again)}</td></tr>"
        for one in example.changes
    )
    return (
        "<h2>What re-tokenizing would have trained</h2><p>The same characters, as the policy sampled them and as the "
        'tokenizer writes them.</p><div class="card"><table><tr><th style="width:4rem">turn</th>'
        f"<th>sampled: what Polar trains</th><th>re-tokenized</th></tr>{rows}</table></div>"
        f'<p class="quiet">{escape(read_again(example))}</p>'
    )


def _pieces(pieces: Sequence[tuple[int, str]]) -> str:
    return "".join(
        f'<span class="piece">{escape(visible(text)) or "…"} <small>{number}</small></span>' for number, text in pieces
    )


def _built(built: Sequence[Built]) -> str:
    longest = max((sum(length for length, _ in trace) for one in built for trace in one.traces), default=1)
    parts = []
    for one in built:
        bars = "".join(_bar(trace, longest) for trace in one.traces)
        traces = "1 trace" if len(one.traces) == 1 else f"{len(one.traces)} traces"
        told = (
            f"{traces}, {one.read} tokens to read in training, {one.trained} of them trained; {one.stored} ids stored, "
            f"{one.size / 1024:.1f} kB on the log"
        )
        parts.append(f'<div class="strategy"><b><code>{escape(one.strategy)}</code></b>: {told}{bars}</div>')
    return (
        "<h2>The same session, built twice</h2><p>Both from the same records on the log, with no GPU and no box. "
        "<code>per_request</code> makes a trace of every call; <code>prefix_merging</code> joins calls that continue "
        "each other, so that a trainer reads the shared prefix once. Green is trained.</p>"
        f'<div class="card">{"".join(parts)}</div>'
    )


def _bar(trace: Sequence[tuple[int, bool]], longest: int) -> str:
    width = 100 * sum(length for length, _ in trace) / longest
    runs = "".join(f'<i{" class=t" if trained else ""} style="flex:{length}"></i>' for length, trained in trace)
    return f'<div class="bar" style="width:{width:.1f}%">{runs}</div>'


def _next(commands: Sequence[str]) -> str:
    lines = "\n".join(escape(one) for one in commands)
    return f'<h2>Now with your own agent</h2><div class="card"><pre>{lines}</pre></div>'


__all__ = ["Change", "Findings", "Group", "page"]
