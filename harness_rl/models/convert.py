"""GGUF → Hugging Face folder, run as a script by the torch environment's interpreter (control has no torch).

Invariant: the written folder is self-contained (weights, tokenizer, chat template, generation config) and its weights are exactly the
dequantised GGUF values: they are saved in float32, because rounding them to bfloat16 would change the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def _repair_pre_tokenizer(tokenizer: Any, gguf: Path) -> None:
    """Split digits one by one where the GGUF says so: the generic conversion leaves that out, and numbers would tokenise differently."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def convert(gguf: Path, out: Path, chat_template: str, model_max_length: int) -> dict[str, Any]:
    """Write `gguf` as a safetensors folder to `out` (created) and return figures for the log: parameters, vocabulary, dtype."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _repair_pre_tokenizer(tokenizer, gguf)
    tokenizer.chat_template = chat_template
    tokenizer.model_max_length = model_max_length
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # Left in place, engines take the folder for a GGUF checkpoint.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = model.generation_config.eos_token_id = end_of_turn
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "vocabulary": len(tokenizer), "dtype": "float32", "eos_token_id": end_of_turn}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chat-template", type=Path, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    args = parser.parse_args()
    figures = convert(args.gguf, args.out, args.chat_template.read_text(encoding="utf-8"), args.max_length)
    json.dump(figures, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
