"""One case for each rule of building. Run it to print the table of the docs: python -m tests.builder.conformance_cases

The ids are explained in `conformance`.
"""

from __future__ import annotations

from polar.schemas import (
    Claim,
    ClientHints,
    Engine,
    LogprobsMode,
    MediaPart,
    PolicySpan,
    Sampling,
)
from tests.builder.conformance import Call, Case, table, tool_call

A = "1 5 3 11 2 3 1 6 3"
"""user a, then the generation prompt."""
NEXT = "2 3 1 5 3 13 2 3 1 6 3"
"""The end of a turn, user c, and the generation prompt."""
IMAGE = MediaPart(kind="image", sha256="one", offset=3, length=1)
OTHER_IMAGE = MediaPart(kind="image", sha256="other", offset=3, length=1)
EXPERTS = Claim(sha256="0" * 64, size=1, uri="file:///experts")
GO_ON = "user a | assistant b | user c"

FIRST = Call(A, "12 2", "user a", "b")
SECOND = Call(f"{A} 12 {NEXT}", "14 2", GO_ON, "d")
SPELLED = Call(A, "11 12 2", "user a", "ab")
RENDERED = Call(f"{A} 112 {NEXT}", "14 2", "user a | assistant ab | user c", "d")

CASES = [
    Case("P1 and P2 hold: one exact trace", [FIRST, SECOND], [f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2]"]),
    Case(
        "other ids of the same text, `on_drift: keep`",
        [SPELLED, RENDERED],
        [f"{A} [11 12 2] 3 1 5 3 13 2 3 1 6 3 {{14 2}} ; 0@0: 2 for 1"],
    ),
    Case(
        "the same, `on_drift: break`",
        [SPELLED, RENDERED],
        [f"{A} [11 12 2] ; ends: drift", f"{A} 112 {NEXT} [14 2]"],
        config={"on_drift": "break"},
    ),
    Case(
        "the same, `on_drift: mask`",
        [SPELLED, RENDERED],
        [f"{A} [11 12 2] 3 1 5 3 13 2 3 1 6 3 (14 2) ; 0@0: 2 for 1 ; retokenized"],
        config={"on_drift": "mask"},
    ),
    Case(
        "a turn cut by the length limit is closed by an id nobody sampled",
        [Call(A, "12", "user a", "b", finish="length"), SECOND],
        [f"{A} [12] {NEXT} [14 2]"],
    ),
    Case(
        "a cut turn rendered otherwise: its end is one that the engine named elsewhere in the session",
        [Call(A, "11 12", "user a", "ab", finish="length"), RENDERED],
        [f"{A} [11 12] {NEXT} {{14 2}} ; 0@0: 2 for 1"],
    ),
    Case(
        "no end of turn is known: the chain ends",
        [
            Call(A, "11 12", "user a", "ab", finish="length"),
            Call(f"{A} 112 {NEXT}", "14", "user a | assistant ab | user c", "d", finish="length"),
        ],
        [f"{A} [11 12] ; ends: no_end_of_turn", f"{A} 112 {NEXT} [14]"],
    ),
    Case(
        "several ends of turn: 4 was sampled, the template writes 2",
        [
            Call(A, "12 4", "user a", "b", stop=4),
            SECOND,
        ],
        [f"{A} [12 4] 3 1 5 3 13 2 3 1 6 3 {{14 2}} ; 0@1: 1 for 1"],
    ),
    Case(
        "a stop string ends the turn; the history does not show it",
        [Call(A, "12 15 16", "user a", "b", stop="ef"), SECOND],
        [f"{A} [12 15 16] {NEXT} {{14 2}} ; 0@1: 2 for 0"],
    ),
    Case(
        "an empty thought in the generation prompt that the history lacks (P1 at −4)",
        [
            Call(f"{A} 8 33 9 33", "12 2", "user a", "b"),
            Call(f"{A} 12 {NEXT} 8 33 9 33", "14 2", GO_ON, "d"),
        ],
        [f"{A} 8 33 9 33 [12 2] 3 1 5 3 13 2 3 1 6 3 8 33 9 33 {{14 2}} ; 0@-4: 4 for 0"],
    ),
    Case(
        "`<think>` in the generation prompt, kept in the history: exact",
        [
            Call(f"{A} 8 3", "11 9 12 2", "user a", "b", {"role": "assistant", "content": "b", "reasoning": "a"}),
            Call(f"{A} 8 3 11 9 12 {NEXT} 8 3", "14 9 15 2", GO_ON, "e"),
        ],
        [f"{A} 8 3 [11 9 12 2] 3 1 5 3 13 2 3 1 6 3 8 3 [14 9 15 2]"],
    ),
    Case(
        "`<think>` in the generation prompt, and the template drops the thought (P1 at −2): not the same text",
        [
            Call(f"{A} 8 3", "11 9 12 2", "user a", "b", {"role": "assistant", "content": "b", "reasoning": "a"}),
            Call(f"{A} 12 {NEXT} 8 3", "14 9 15 2", GO_ON, "e"),
        ],
        [f"{A} 8 3 [11 9 12 2] ; ends: history_changed (template)", f"{A} 12 {NEXT} 8 3 [14 9 15 2]"],
    ),
    Case(
        "the reply's newline melts with the prompt's (P1 at −1)",
        [
            Call(A, "3 12 2", "user a", "\nb"),
            Call(f"1 5 3 11 2 3 1 6 33 12 {NEXT}", "14 2", "user a | assistant \nb | user c", "d"),
        ],
        [f"{A} [3 12 2] 3 1 5 3 13 2 3 1 6 3 {{14 2}} ; 0@-1: 2 for 1"],
    ),
    Case(
        "the client trimmed the reply's newline, and what the template shows lacks it",
        [
            Call(A, "12 13 3 2", "user a", "bc\n"),
            Call(f"{A} 12 13 {NEXT}", "14 2", "user a | assistant bc | user c", "d"),
        ],
        [f"{A} [12 13 3 2] ; ends: history_changed (client)", f"{A} 12 13 {NEXT} [14 2]"],
    ),
    Case(
        "the client trimmed it, and the template puts it back: exact",
        [
            Call(A, "12 13 3 2", "user a", "bc\n"),
            Call(f"{A} 12 13 3 {NEXT}", "14 2", "user a | assistant bc | user c", "d"),
        ],
        [f"{A} [12 13 3 2] 3 1 5 3 13 2 3 1 6 3 [14 2]"],
    ),
    Case(
        "the client rewrote the reply",
        [FIRST, Call(f"{A} 19 {NEXT}", "14 2", "user a | assistant i | user c", "d")],
        [f"{A} [12 2] ; ends: history_changed (client)", f"{A} 19 {NEXT} [14 2]"],
    ),
    Case(
        "the template leaves the tool call out",
        [
            Call(A, "12 21 22 23 24 25 2", "user a", "b", {**tool_call('{"a":1}'), "content": "b"}, "tool_calls"),
            SECOND,
        ],
        [f"{A} [12 21 22 23 24 25 2] ; ends: history_changed (template)", f"{A} 12 {NEXT} [14 2]"],
    ),
    Case(
        "a reply cut inside a character: what comes back as U+FFFD is not what was sampled",
        [
            Call(A, "12 91", "user a", "b\ufffd", finish="length"),
            Call(f"{A} 12 92 93 {NEXT}", "14 2", "user a | assistant b\ufffd | user c", "d"),
        ],
        [f"{A} [12 91] ; ends: history_changed (bytes)", f"{A} 12 92 93 {NEXT} [14 2]"],
    ),
    Case(
        "arguments of a tool call with other spaces: the same text",
        [
            Call(A, "21 22 23 2", "user a", "", tool_call('{"a":1}'), "tool_calls"),
            Call(f"{A} 21 22 29 23 {NEXT}", "14 2", "user a | assistant  | user c", "d"),
        ],
        [f"{A} [21 22 23 2] 3 1 5 3 13 2 3 1 6 3 {{14 2}} ; 0@2: 0 for 1"],
    ),
    Case(
        "other tools",
        [
            Call(f"41 {A}", "12 2", "user a", "b", tools="x"),
            Call(f"42 {A} 12 {NEXT}", "14 2", GO_ON, "d", tools="y"),
        ],
        [f"41 {A} [12 2] ; ends: tools_changed", f"42 {A} 12 {NEXT} [14 2]"],
    ),
    Case(
        "an image in the prefix stays: it is told by its place",
        [
            Call(A, "12 2", "user a", "b", more={"media": [IMAGE]}),
            Call(f"{A} 12 {NEXT}", "14 2", GO_ON, "d", more={"media": [IMAGE]}),
        ],
        [f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2] ; image at 3"],
    ),
    Case(
        "another image under the same ids",
        [
            Call(A, "12 2", "user a", "b", more={"media": [IMAGE]}),
            Call(f"{A} 12 {NEXT}", "14 2", GO_ON, "d", more={"media": [OTHER_IMAGE]}),
        ],
        [f"{A} [12 2] ; image at 3 ; ends: media_changed", f"{A} 12 {NEXT} [14 2] ; image at 3"],
    ),
    Case(
        "another model",
        [
            FIRST,
            Call(
                f"{A} 12 {NEXT}",
                "14 2",
                GO_ON,
                "d",
                more={"engine": Engine(model="other", endpoint="e", logprobs_mode=LogprobsMode.PROCESSED)},
            ),
        ],
        [f"{A} [12 2] ; ends: model_changed", f"{A} 12 {NEXT} [14 2]"],
    ),
    Case(
        "a retry: the reply that the history shows goes on, the other is a trace of its own",
        [Call(A, "19 2", "user a", "i"), FIRST, SECOND],
        [f"{A} [19 2]", f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2]"],
    ),
    Case(
        "the same, `siblings: set_aside`",
        [Call(A, "19 2", "user a", "i"), FIRST, SECOND],
        [f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2]"],
        aside=["0 sibling"],
        config={"siblings": "set_aside"},
    ),
    Case(
        "a fork from an earlier turn shares its prefix, masked",
        [FIRST, SECOND, Call(f"{A} 12 2 3 1 5 3 16 2 3 1 6 3", "17 2", "user a | assistant b | user f", "g")],
        [f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2] ; ends: forked", f"{A} 12 2 3 1 5 3 16 2 3 1 6 3 [17 2]"],
    ),
    Case(
        "a compaction: the next conversation starts from its reply",
        [
            FIRST,
            Call(
                f"{A} 12 2 3 1 5 3 18 2 3 1 6 3",
                "21 22 23 2",
                "user a | assistant b | user Sum it up.",
                "Letters a and b were said.",
            ),
            Call("1 5 3 21 22 23 2 3 1 6 3", "14 2", "user So far: Letters a and b were said.", "d"),
        ],
        [
            f"{A} [12 2] ; ends: compaction",
            f"{A} 12 2 3 1 5 3 18 2 3 1 6 3 [21 22 23 2] ; compaction",
            "1 5 3 21 22 23 2 3 1 6 3 [14 2]",
        ],
    ),
    Case(
        "the same, asked without the tools: it is the compaction that ends the trace",
        [
            Call(f"41 {A}", "12 2", "user a", "b", tools="x"),
            Call(
                f"{A} 12 2 3 1 5 3 18 2 3 1 6 3",
                "21 22 23 2",
                "user a | assistant b | user Sum it up.",
                "Letters a and b were said.",
            ),
            Call("41 1 5 3 21 22 23 2 3 1 6 3", "14 2", "user So far: Letters a and b were said.", "d", tools="x"),
        ],
        [
            f"41 {A} [12 2] ; ends: compaction",
            f"{A} 12 2 3 1 5 3 18 2 3 1 6 3 [21 22 23 2] ; compaction",
            "41 1 5 3 21 22 23 2 3 1 6 3 [14 2]",
        ],
    ),
    Case(
        "a sub-agent: it begins with the argument of a tool call",
        [
            Call(
                f"41 {A}",
                "21 22 2",
                "user a",
                "",
                tool_call('{"prompt": "Look for the letter b."}'),
                "tool_calls",
                tools="x",
            ),
            Call("42 1 5 3 21 2 3 1 6 3", "12 2", "system S | user Look for the letter b.", "found", tools="y"),
            Call(
                f"41 {A} 21 22 2 3 1 7 3 23 2 3 1 6 3",
                "14 2",
                "user a | assistant  | tool found",
                "d",
                tools="x",
            ),
        ],
        [f"41 {A} [21 22 2] 3 1 7 3 23 2 3 1 6 3 [14 2]", "42 1 5 3 21 2 3 1 6 3 [12 2] ; subagent"],
    ),
    Case(
        "a side call: no tools and another system prompt beside a conversation with tools",
        [
            Call(f"41 {A}", "12 2", "system S | user a", "b", tools="x"),
            Call("1 5 3 25 2 3 1 6 3", "26 2", "system Write a title. | user a", "t"),
        ],
        [f"41 {A} [12 2]", "1 5 3 25 2 3 1 6 3 (26 2) ; side"],
    ),
    Case(
        "a mark of the harness wins over structure",
        [
            FIRST,
            Call("1 5 3 19 2 3 1 6 3", "26 2", "user i", "t", more={"hints": ClientHints(request_kind="title")}),
        ],
        [f"{A} [12 2]", "1 5 3 19 2 3 1 6 3 (26 2) ; side"],
    ),
    Case(
        "a conversation that has nothing to do with the one before",
        [FIRST, Call("1 5 3 19 2 3 1 6 3", "14 2", "user i", "d")],
        [f"{A} [12 2] ; ends: new_conversation", "1 5 3 19 2 3 1 6 3 [14 2]"],
    ),
    Case(
        "token-in, without messages: exact by ids alone",
        [Call("11 12", "13 2", "", ""), Call("11 12 13 2 14", "15 2", "", "")],
        ["11 12 [13 2] 14 [15 2]"],
    ),
    Case(
        "several choices: each is a reply of its own, the chosen one goes on",
        [
            Call(A, "19 2", "user a", "i", more={"also": ("12 2", "b")}),
            SECOND,
        ],
        [f"{A} [19 2]", f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14 2]"],
    ),
    Case(
        "weights that changed at a known place: the trace says so and trains",
        [
            Call(
                A,
                "12 2",
                "user a",
                "b",
                reply_more={
                    "spans": [
                        PolicySpan(start=0, end=1, version="v1", exact=True),
                        PolicySpan(start=1, end=2, version="v2", exact=True),
                    ]
                },
            )
        ],
        [f"{A} [12 2] ; weights v1, v2"],
    ),
    Case(
        "weights that changed at an unknown place: masked",
        [
            Call(
                A,
                "12 2",
                "user a",
                "b",
                reply_more={"spans": [PolicySpan(start=0, end=2, version="v2", exact=False)]},
            )
        ],
        [f"{A} (12 2) ; policy_version"],
    ),
    Case(
        "an id without log-probability costs itself only",
        [Call(A, "12 13 2", "user a", "bc", reply_more={"unscored": 1})],
        [f"{A} [12] (13) [2] ; no_logprob"],
    ),
    Case(
        "an aborted reply is kept and masked",
        [Call(A, "12", "user a", "b", finish="abort")],
        [f"{A} (12) ; aborted"],
    ),
    Case(
        "a constrained reply is kept and masked",
        [Call(A, "12 2", "user a", "b", more={"constraints": ["grammar"]})],
        [f"{A} (12 2) ; constrained"],
    ),
    Case(
        "a greedy reply is kept and masked",
        [Call(A, "12 2", "user a", "b", more={"sampling": Sampling(temperature=0.0)})],
        [f"{A} (12 2) ; temperature_0"],
    ),
    Case(
        "`max_tokens_per_trace`: the longest prefix, here to the middle of a reply",
        [FIRST, SECOND],
        [f"{A} [12 2] 3 1 5 3 13 2 3 1 6 3 [14] ; cut 1 ; ends: max_tokens"],
        config={"max_tokens_per_trace": 22},
    ),
    Case(
        "the same: what begins after it is set aside",
        [FIRST, SECOND],
        [f"{A} [12 2] ; cut 12 ; ends: max_tokens"],
        aside=["1 max_tokens"],
        config={"max_tokens_per_trace": 21},
    ),
    Case(
        "routed experts stay where the context is exact and are dropped where it is not",
        [
            Call(A, "11 12 2", "user a", "ab", reply_more={"experts": EXPERTS}),
            Call(
                f"{A} 112 {NEXT}",
                "14 2",
                "user a | assistant ab | user c",
                "d",
                reply_more={"experts": EXPERTS},
            ),
        ],
        [f"{A} [11 12 2] 3 1 5 3 13 2 3 1 6 3 {{14 2}} ; 0@0: 2 for 1 ; experts retokenized"],
    ),
    Case(
        "`per_request`: each reply with its own prompt",
        [SPELLED, RENDERED],
        [f"{A} [11 12 2]", f"{A} 112 {NEXT} [14 2]"],
        strategy="per_request",
    ),
    Case(
        "`prefix_tree`: exact traces that say where they branch off",
        [SPELLED, RENDERED],
        [f"{A} [11 12 2]", f"{A} 112 {NEXT} [14 2] ; shares 9 of trace 0"],
        strategy="prefix_tree",
    ),
]


if __name__ == "__main__":
    print(table(CASES))
