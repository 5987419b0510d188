"""Stage `sft`: the cold start (paper section 3.2): the student learns the form from the teacher's filtered trajectories."""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from parallel_r1 import jobs
from parallel_r1.attention import structure_forward
from parallel_r1.config import SftConfig
from parallel_r1.markup import TagIds
from parallel_r1.training import runs, supervised


def main() -> None:
    """Run one job: inputs `base` (checkpoint) and `trajectories` (filtered)."""
    job = jobs.read_job()
    runs.quiet(job.threads)
    config = SftConfig.model_validate(job.config)
    runs.join(config.launch)
    checkpoint = job.inputs["base"] / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True)
    if config.attention == "structured":
        structure_forward(model, TagIds.from_tokenizer(tokenizer))
    rows = jobs.read_lines(job.inputs["trajectories"] / jobs.TRAJECTORIES)
    dataset, too_long = supervised.examples(tokenizer, rows, config.prompt, config.max_tokens)
    steps = math.ceil(config.epochs * len(dataset) / config.batch_size)
    steps = min(steps, config.max_steps or steps)
    metrics = supervised.train(job, model, tokenizer, dataset, config, steps, config.micro_batch_size)
    runs.leave()
    jobs.finish({**metrics, "examples": len(dataset), "too_long": too_long})


if __name__ == "__main__":
    main()
