"""Make the small tokenizer that ships with this package: a real byte-level BPE with ChatML's special tokens.

usage: python -m polar.devmodel.train_tokenizer OUT.json

It learns from text that every Python installation carries (the standard library's sources and their docstrings), so
that nothing is downloaded and anyone can make it again. The same Python version gives the same file; another version
gives a slightly different vocabulary, which no test may depend on. The split is SmolLM2's: single digits, then byte
level.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = (
    4096  # the file stays near 120 KB, and a sentence of English takes about twice the tokens of a large vocabulary
)
# Chat words and markup that sources hardly hold; repeated so that they earn merges.
CHAT_TEXT = (
    "system\nYou are a helpful assistant.\nuser\nassistant\ntool\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    "<tool_response>\n</tool_response>\n<tools>\n</tools>\n<think>\n</think>\n"
) * 400


def _corpus() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.glob("*.py")) + sorted(library.glob("*.txt")) + sorted(library.glob("email/*.py")):
        yield source.read_text(encoding="utf-8", errors="replace")
    yield CHAT_TEXT


def train() -> Tokenizer:
    """Return the tokenizer; ids 0, 1 and 2 are the special tokens, as in SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


if __name__ == "__main__":
    train().save(sys.argv[1], pretty=False)
