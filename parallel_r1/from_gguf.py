"""A checkpoint folder from a GGUF file: weights dequantised to bfloat16, tokenizer and chat template as the file has them.

    python -m parallel_r1.from_gguf FILE.gguf FOLDER

Needs the package gguf (`make smollm2` brings it). The tokenizer takes its end-of-sequence and padding token from the model's config, since
transformers 5.17 reads others from some files (SmolLM2: <|im_start|>).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from parallel_r1 import student


def convert(file: Path, folder: Path) -> None:
    """Write `folder` from `file`."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, clean_up_tokenization_spaces=False)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(loaded.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded.config.pad_token_id or loaded.config.eos_token_id)
    student.save(_plain(loaded), tokenizer, folder)


def _plain(loaded: PreTrainedModel) -> PreTrainedModel:
    """The same model without its quantisation, which transformers refuses to save."""
    config = loaded.config.to_dict()
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(config), dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    return model


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
