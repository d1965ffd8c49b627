"""The agent of `polar demo`: it asks a model short questions and, where an answer will not do, says so and asks again.

It knows nothing of Polar: the official `openai` package, OPENAI_BASE_URL and OPENAI_API_KEY, as anywhere; no shell, no
tools. The first argument names a task. The answers that count go to `answers.txt`, a line each, for a grader to read.
"""

import os
import re
import sys
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

TASKS = {  # questions, and what an answer must contain
    "colors": [("Name three colors, such as red, green or blue.", "(red|green|blue|yellow|white|black).*" * 3)],
    "capitals": [("What is the capital of France?", "paris"), ("And what is the capital of Italy?", "rome")],
    "tokyo": [
        ("What is the capital of Japan?", "tokyo"),
        ("Name a food that people eat in Tokyo.", "sushi|ramen|rice|noodle|tempura|udon|soba|miso|fish"),
    ],
}
TRIES = 2


def main(task: str) -> int:
    client = OpenAI(max_retries=3, timeout=300)  # address and key come from the environment
    messages: list[ChatCompletionMessageParam] = []
    answers = []
    for question, wanted in TASKS[task]:
        messages.append({"role": "user", "content": question})
        for _ in range(TRIES):
            reply = client.chat.completions.create(model=os.environ.get("OPENAI_MODEL", "policy"), messages=messages)
            answer = " ".join((reply.choices[0].message.content or "").split())
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
            print(f"{question} {answer}", flush=True)
            if re.search(wanted, answer, re.IGNORECASE):
                break
            messages.append({"role": "user", "content": "That is not right. " + question})
        answers.append(answer)
    Path("answers.txt").write_text("".join(f"{answer}\n" for answer in answers))
    return 0  # a wrong answer is the grader's business; only a broken agent ends with another code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
