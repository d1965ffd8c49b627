"""An independent forward pass: the log-probability of each sampled id after the ids before it.

Runs in an environment that has torch and transformers and nothing of Polar:
    python rescore.py MODEL_DIR < spans.json > scores.json
Input: a list of {ids, spans: [[start, end], …]}; output: for each, the natural log-probabilities of the ids in its
spans, at temperature 1, computed in float32 from the stored bfloat16 weights.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for one in json.load(sys.stdin):
            ids = torch.tensor([one["ids"]])
            scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
            found.append(
                [[float(scores[i - 1, one["ids"][i]]) for i in range(start, end)] for start, end in one["spans"]]
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
