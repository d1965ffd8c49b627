"""A whole agent in forty lines: asks the model a short fact, checks the answer, and says what was wrong with it.

It knows nothing of Polar: the official `openai` package, OPENAI_BASE_URL and OPENAI_API_KEY, as anywhere. A first
argument names the country. The last answer goes to `answer.txt` in the working folder, for whoever grades it.

    {"agent": {"harness": "shell", "custom_shell": {"command": "python3 capitals_agent.py Japan"}}}
"""

import os
import sys
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

CAPITALS = {"Japan": "Tokyo", "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid"}
TURNS = 3


def main() -> int:
    country = sys.argv[1] if len(sys.argv) > 1 else "Japan"
    wanted = CAPITALS[country]
    client = OpenAI(max_retries=3, timeout=120)  # address and key come from the environment
    model = os.environ.get("POLAR_MODEL") or os.environ.get("OPENAI_MODEL") or "policy"
    question = f"What is the capital of {country}? Answer in one short sentence."
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    answer = ""
    for turn in range(1, TURNS + 1):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=40)
        answer = (reply.choices[0].message.content or "").strip()
        print(f"turn {turn}: {answer}", flush=True)
        if wanted.lower() in answer.lower():
            break
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"That does not name it. The capital of {country} is a city. Which one?"},
        ]
    Path("answer.txt").write_text(answer + "\n")
    return 0  # a wrong answer is the grader's business; only a broken agent ends with another code


if __name__ == "__main__":
    sys.exit(main())
