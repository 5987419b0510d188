"""Load a checkpoint folder as a stranger would, and say what it is.

    python -m parallel_r1.exported FOLDER

Prints one JSON object: parameters, architecture, and what a greedy continuation of a few tokens is. A chat template is added where there
is none. Fails where the folder doesn't load by itself or a tag is not one plain token of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from parallel_r1.markup import TAGS
from parallel_r1.prompts import encode
from parallel_r1.student import add_template

GREEDY_TOKENS = 16


def look_at(folder: Path) -> dict[str, Any]:
    """Parameters, architecture, a greedy continuation. Raises ValueError where a tag is no single plain token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        add_template(tokenizer)
        tokenizer.save_pretrained(folder)
    broken = [tag for tag in TAGS if len(tokenizer.encode(tag, add_special_tokens=False)) != 1 or tag in tokenizer.all_special_tokens]
    if broken:
        raise ValueError(f"{folder}: {', '.join(broken)}: not a plain token of its own")
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).eval()
    asked = torch.tensor([encode(tokenizer, "What is 2+3?\n")])
    with torch.no_grad():
        out = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=GREEDY_TOKENS, do_sample=False)
    return {"parameters": model.num_parameters(), "architecture": type(model).__name__, "greedy": out[0, asked.shape[1] :].tolist()}


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(json.dumps(look_at(Path(sys.argv[1]))))
