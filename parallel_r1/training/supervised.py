"""Learning from given solutions, by TRL's SFTTrainer: the base model and the cold start share this.

Loss on the response only, prompts masked. Examples are token ids made here, so that tags are the ids the engine forces and the response
ends in EOS, whatever a chat template would do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from parallel_r1 import adapters, prompts
from parallel_r1.config import Prompt, ScratchStudent, SftConfig
from parallel_r1.jobs import Job
from parallel_r1.training import runs

LOG_EVERY = 5


def examples(tokenizer: PreTrainedTokenizerBase, rows: Iterable[dict[str, Any]], prompt: Prompt, max_tokens: int) -> tuple[Dataset, int]:
    """Token ids and completion masks of {"problem", "text"} rows; also gives how many were longer than `max_tokens` and left out."""
    kept, too_long = [], 0
    for row in rows:
        asked = prompts.encode(tokenizer, prompts.render(prompt, row["problem"]))
        response = [*tokenizer.encode(row["text"], add_special_tokens=False), tokenizer.eos_token_id]
        if len(asked) + len(response) > max_tokens:
            too_long += 1
        else:
            kept.append({"input_ids": asked + response, "completion_mask": [0] * len(asked) + [1] * len(response)})
    if not kept and not too_long:
        raise ValueError("there is no example: the filter kept no trajectory; its artifact shows why")
    if not kept:
        raise ValueError(f"no example is within {max_tokens} tokens ({too_long} were longer): raise max_tokens")
    return Dataset.from_list(kept), too_long


def train(
    job: Job,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    config: SftConfig | ScratchStudent,
    steps: int,
    micro_batch_size: int,
) -> dict[str, float]:
    """Train `model`, or adapters of it, going on from the last whole checkpoint in the job's work folder; save it to `out/checkpoint`.

    Gives the last metrics.
    """
    arguments = runs.trainer_arguments(
        job.work, config.optimizer, steps, config.checkpoint_every, job.seed, micro_batch_size, config.batch_size
    )
    progress = runs.Progress(job.work, show=("loss", "learning_rate"))
    checkpoints = runs.Checkpoints(job, config, dataset)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            **arguments,
            **runs.tracked(job),
            logging_steps=min(LOG_EVERY, steps),  # a shorter run has a last entry too
            completion_only_loss=True,
            max_length=None,
            train_sampling_strategy="random",  # group_by_length goes from long to short over and over: measured to ruin the base model
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[progress, runs.TensorBoard(job.work), checkpoints],
        peft_config=adapters.peft_config(getattr(config, "lora", None), model, tokenizer),
    )
    adapters.show_bias(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoints.last())
    runs.save(trainer, tokenizer, job.out / "checkpoint")
    return runs.publish(job.work, job.out)
