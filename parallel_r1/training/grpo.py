"""Stage `rl`: GRPO by TRL, rollouts by spawn-join (paper sections 3.3 and 3.4).

What is sampled is what is trained (method.md section 6). Deviations from TRL's own loop:
- the engine is ours: `rollout_func` carries out spawn-join rollouts on it, after the trainer's weights were pushed to it;
- forced tokens are masked out of the loss (`env_mask`);
- log-probs are computed in the context of sampling (`scoring: exact`, parallel_r1/attention.py), through the one method that TRL's loss,
  old log-probs and reference log-probs all go through;
- `rollout_gap/*` measures |log p_train - log p_sampled| by region in every step, and fails the stage when the first step shows it large.
TRL's importance correction stays off: it is tied to its own vLLM client. `importance_correction: token` makes the sampler the old policy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from parallel_r1 import adapters, attention, jobs, prompts
from parallel_r1.config import RlConfig
from parallel_r1.problems import Problem, draw, read_problems
from parallel_r1.rewards import Outcome, reward_of
from parallel_r1.rollout.engines import Engine, model_dtype, open_engine
from parallel_r1.rollout.machine import Rollout
from parallel_r1.rollout.records import Studio
from parallel_r1.rollout.turns import Turns
from parallel_r1.training import runs
from parallel_r1.training.pushing import Push
from parallel_r1.trajectory import Trajectory

SHOWN = ("reward", "accuracy", "parallel_ratio", "valid_ratio", "response_tokens", "loss")


def main() -> None:
    """Run one job: inputs `checkpoint` and the training sets by name."""
    job = jobs.read_job()
    runs.quiet(job.threads)
    config = RlConfig.model_validate(job.config)
    runs.join(config.launch)
    checkpoint = job.inputs["checkpoint"] / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True)
    studio = Studio(tokenizer, config.rollout)
    problems, too_long = _problems(job, config, studio)
    engine = open_engine(checkpoint, config.rollout, job.seed, beside_trainer=True)
    jobs.note(f"engine: {engine.name}")
    dataset = _dataset(problems, config)
    checkpoints = runs.Checkpoints(job, config, dataset)
    trainer = ParallelGRPOTrainer(
        model=model,
        args=_arguments(job, config),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[runs.Progress(job.work, SHOWN), runs.TensorBoard(job.work), checkpoints],
        peft_config=adapters.peft_config(config.lora, model, tokenizer),
        settings=config,
        engine=engine,
        studio=studio,
        samples_path=job.work / jobs.ROLLOUTS,
    )
    adapters.show_bias(trainer.model)
    trainer.train(resume_from_checkpoint=checkpoints.last())
    runs.save(trainer, tokenizer, job.out / "checkpoint")
    runs.leave()
    if jobs.is_first():
        jobs.write_lines(job.out / jobs.ROLLOUTS, _newest(jobs.read_lines(job.work / jobs.ROLLOUTS)))
    jobs.finish({**runs.publish(job.work, job.out), "prompts_too_long": too_long})


def _problems(job: jobs.Job, config: RlConfig, studio: Studio) -> tuple[list[Problem], int]:
    sets = {name: read_problems(job.inputs[name] / jobs.PROBLEMS) for name in config.problems}
    fitting = {name: [p for p in found if studio.prompt_ids(config.prompt, p.problem) is not None] for name, found in sets.items()}
    too_long = sum(map(len, sets.values())) - sum(map(len, fitting.values()))
    return draw(fitting, config.problems, config.steps * config.prompts_per_step, job.seed), too_long


def _dataset(problems: list[Problem], config: RlConfig) -> Dataset:
    return Dataset.from_list([{"prompt": prompts.render(config.prompt, p.problem), "row": json.dumps(vars(p))} for p in problems])


def _arguments(job: jobs.Job, config: RlConfig) -> GRPOConfig:
    batch = config.prompts_per_step * config.rollouts_per_prompt
    shared = runs.trainer_arguments(
        job.work, config.optimizer, config.steps, config.checkpoint_every, job.seed, config.micro_batch_size, batch
    )
    return GRPOConfig(
        **shared,
        **runs.tracked(job),
        num_generations=config.rollouts_per_prompt,
        max_completion_length=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        logging_steps=1,
        loss_type="dapo",
        scale_rewards="group",
        beta=config.kl_coefficient,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        use_vllm=False,
        shuffle_dataset=False,
    )


def _newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a step that was run twice, once before a kill and once after, the later rollouts."""
    attempt = {row["step"]: row["attempt"] for row in rows}
    return [{key: value for key, value in row.items() if key != "attempt"} for row in rows if row["attempt"] == attempt[row["step"]]]


class ParallelGRPOTrainer(GRPOTrainer):
    """GRPOTrainer over spawn-join rollouts, scored in the context in which they were sampled."""

    def __init__(self, *, settings: RlConfig, engine: Engine, studio: Studio, samples_path: Path, **options: Any) -> None:
        self._settings = settings
        self._engine = engine
        self._studio = studio
        self._samples_path = samples_path
        self._attempt = len({row["attempt"] for row in jobs.read_lines(samples_path)})
        self._turns = Turns(engine)
        self._layout: dict[str, Tensor] = {}
        self._gaps: dict[str, list[Tensor]] = defaultdict(list)
        self._checked = False
        super().__init__(reward_funcs=self._reward, rollout_func=_rollout, **options)
        self._push = Push(engine, settings.rollout, self.accelerator, self.model)

    # rollouts

    def carry_out(self, rendered: list[str]) -> dict[str, Any]:
        """Rollouts of the given prompts on the engine, with the trainer's present weights."""
        step = self.state.global_step
        self._turns.wake()
        self._turns.sync(step, self._push)
        first = self._first(len(rendered))
        rollouts = [
            self._studio.rollout(prompts.encode(self._studio.tokenizer, prompt), f"{self.args.seed}/{step}/{index}")
            for index, prompt in enumerate(rendered, start=first)
        ]
        self._turns.generate(step, rollouts)
        self._turns.sleep()
        trajectories = [rollout.trajectory for rollout in rollouts]
        return {
            "prompt_ids": [trajectory.prompt_ids for trajectory in trajectories],
            "completion_ids": [trajectory.completion_ids for trajectory in trajectories],
            "logprobs": [trajectory.logprobs for trajectory in trajectories],
            "env_mask": [trajectory.loss_mask for trajectory in trajectories],
            "rollout": rollouts,
        }

    def _first(self, count: int) -> int:
        """Place of this process's first rollout among those of the step, of which each process has `count`. A rollout is called by its
        place, so it has the same seeds however many processes there are."""
        return self.accelerator.process_index * count

    def _reward(self, *, rollout: list[Rollout], row: list[str], **_: Any) -> list[float]:
        """Rewards of rollouts, graded; logs what a person wants to see of them and keeps a few."""
        rollouts, problems = rollout, [Problem(**json.loads(entry)) for entry in row]
        group, first, step = self._settings.rollouts_per_prompt, self._first(len(rollouts)), self.state.global_step
        records = self._studio.records(rollouts, problems, "train", [index % group for index in range(first, first + len(rollouts))])
        rewards = [reward_of(self._settings, step, _outcome(record)) for record in records]
        for record in records:
            for name, value in _measures(record).items():
                self._log_metric(name, value)  # TRL takes the mean over the rollouts of all processes
        when = {"step": step + 1, "attempt": self._attempt}
        rewarded = [{**record, "reward": reward, **when} for record, reward in zip(records, rewards, strict=True)]
        self._keep_some(dict(enumerate(rewarded, start=first)), len(records) * self.accelerator.num_processes)
        return rewards

    def _keep_some(self, records: dict[int, dict[str, Any]], count: int) -> None:
        """Write down evenly spaced ones of the step's `count` rollouts; `records` are this process's, by place."""
        stride = max(1, count // max(1, self._settings.sample_rollouts))
        places = range(0, count, stride)[: self._settings.sample_rollouts]
        kept = gather_object([records[place] for place in places if place in records])
        if jobs.is_first():
            jobs.append_lines(self._samples_path, kept)

    # scoring

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        """TRL's rollouts, with the layout of their paths kept for every log-prob that is computed of them."""
        generated = super()._generate(prompts)
        completion_ids, extra_fields = generated[1], generated[5]
        trajectories = [rollout.trajectory for rollout in extra_fields["rollout"]]
        width = max(map(len, completion_ids))
        paths = attention.Paths.of_trajectories(trajectories, width)
        layout = {"block_start": paths.block_start, "path_start": paths.path_start, "region": _regions(trajectories, width)}
        self._layout = {name: tensor.to(self.accelerator.device) for name, tensor in layout.items()}
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs) | self._layout
        if self._settings.importance_correction == "token":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        self._layout = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs and entropies of the response, (batch, logits_to_keep), in the context of sampling."""
        if self._settings.scoring == "published":
            scores = super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, batch_size, **options)
        else:
            rows = batch_size or len(input_ids)
            chunks = [slice(start, start + rows) for start in range(0, len(input_ids), rows)]
            parts = [self._exact_scores(model, input_ids, attention_mask, logits_to_keep, chunk) for chunk in chunks]
            scores = (*(torch.cat(values) for values in zip(*parts, strict=True)), None)
        if "sampling_per_token_logps" in self._layout:
            self._measure_gap(scores[0].detach(), self._layout)
        return scores

    def _exact_scores(self, model: Any, input_ids: Tensor, attention_mask: Tensor, width: int, rows: slice) -> tuple[Tensor, Tensor]:
        paths = attention.Paths(self._layout["block_start"][rows], self._layout["path_start"][rows])
        laid_out = attention.scoring_inputs(self._settings.rollout.attention, input_ids[rows], attention_mask[rows], paths)
        with self.accelerator.autocast():
            outputs = model(
                input_ids=laid_out.input_ids,
                attention_mask=laid_out.visible,
                position_ids=laid_out.positions,
                labels=laid_out.labels,
                fused_lm_head=True,
            )
        entropy = outputs.entropy if outputs.entropy is not None else torch.zeros_like(outputs.log_probs)
        # TRL scores from the second column on
        logps, entropies = (laid_out.gather_back(nn.functional.pad(values, (1, 0))) for values in (outputs.log_probs, entropy))
        return logps[:, -width:], entropies[:, -width:]

    # the gap between trainer and sampler

    def _measure_gap(self, logps: Tensor, scored: dict[str, Tensor]) -> None:
        sampled = (scored["completion_mask"] * scored["tool_mask"]).bool()
        gap = (logps - scored["sampling_per_token_logps"]).abs().float()
        for index, region in enumerate(REGIONS):
            self._gaps[region].append(gap[sampled & (scored["region"] == index)].cpu())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the gaps of the step that was just made; the first step's must be within the bound."""
        worst = 0.0
        for region in REGIONS if self._gaps else ():
            values = torch.cat(gather_object(self._gaps[region]))
            if len(values):
                worst = max(worst, float(values.max()))
                logs |= {
                    f"rollout_gap/{region}/mean": float(values.mean()),
                    f"rollout_gap/{region}/p99": float(values.kthvalue(max(1, round(0.99 * len(values)))).values),
                    f"rollout_gap/{region}/max": float(values.max()),
                }
        measured = bool(self._gaps)
        self._gaps.clear()
        super().log(logs, start_time)
        if measured and not self._checked:
            self._checked = True
            self._check_gap(worst)

    def _check_gap(self, worst: float) -> None:
        bound = self._settings.max_rollout_gap or (1e-3 if model_dtype() == torch.float32 else 0.5)
        if self._settings.scoring == "exact" and worst > bound:
            raise RuntimeError(
                f"the trainer and {self._engine.name} disagree by up to {worst:.3g} nats on tokens just sampled, more than {bound:g}: "
                "what is sampled would not be what is trained. Check the engine's dtype and attention; rl.N.max_rollout_gap sets the bound."
            )


REGIONS = ("main", "path_1", "path_n", "summary")


def _regions(trajectories: list[Trajectory], width: int) -> Tensor:
    """(batch, width) index into REGIONS of each response token."""
    region = torch.zeros(len(trajectories), width, dtype=torch.long)
    for row, trajectory in enumerate(trajectories):
        for span in trajectory.spans:
            if span.kind == "path":
                region[row, span.start : span.end] = 1 if span.path == 1 else 2
            elif span.kind == "summary":
                region[row, span.start : span.end] = 3
    return region


def _rollout(rendered: list[str], trainer: ParallelGRPOTrainer) -> dict[str, Any]:
    return trainer.carry_out(rendered)


def _outcome(record: dict[str, Any]) -> Outcome:
    return Outcome(**{field.name: record[field.name] for field in fields(Outcome)})


def _measures(record: dict[str, Any]) -> dict[str, float]:
    """What is logged of a rollout, as means over those that have it."""
    measures = {
        "accuracy": record["correct"],
        "parallel_ratio": record["blocks"] > 0,
        "valid_ratio": record["blocks"] > 0 and record["well_formed"],
        "truncated_ratio": record["finish"] == "length",
        "response_tokens": record["tokens"],
        "critical_path_tokens": record["critical_path_tokens"],
        "blocks_per_response": record["blocks"],
    } | ({"path_similarity": record["path_similarity"]} if record["blocks"] else {})
    return measures if record["position"] is None else measures | {"parallel_position": record["position"]}


if __name__ == "__main__":
    main()
