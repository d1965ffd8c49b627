"""An independent forward pass over the embedded model's own weights: transformers' Llama in float32.

Runs in an environment that has torch, transformers and gguf, and nothing of Polar:
    python rescore_gguf.py MODEL.gguf < spans.json > scores.json
Input and output as `rescore.py`. Names and the order of rotated rows are llama.cpp's on one side, transformers' on the
other; the numbers are the dequantized ones, so a difference is one of arithmetic and not of weights.
"""

from __future__ import annotations

import json
import sys

import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def load(path: str) -> LlamaForCausalLM:
    reader = GGUFReader(path)

    def value(name: str) -> object:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = int(value("attention.head_count")), int(value("attention.head_count_kv"))  # type: ignore[call-overload]
    found = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if tensor.name in TOP:
            found[TOP[tensor.name]] = weight
            continue
        _, number, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # pairs of a rotation stand beside each other; here half a head apart
            count = heads if part == "attn_q" else kv_heads
            weight = weight.reshape(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        found[f"model.layers.{number}.{NAMES[part]}.weight"] = weight
    vocabulary, width = found["model.embed_tokens.weight"].shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=found["model.layers.0.mlp.up_proj.weight"].shape[0],
        num_hidden_layers=int(value("block_count")),  # type: ignore[call-overload]
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(value("context_length")),  # type: ignore[call-overload]
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),  # type: ignore[arg-type]
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},  # type: ignore[arg-type]
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(found, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval()


def main() -> None:
    model = load(sys.argv[1])
    found = []
    with torch.inference_mode():
        for one in json.load(sys.stdin):
            scores = torch.log_softmax(model(torch.tensor([one["ids"]])).logits[0].float(), dim=-1)
            found.append(
                [[float(scores[i - 1, one["ids"][i]]) for i in range(start, end)] for start, end in one["spans"]]
            )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
