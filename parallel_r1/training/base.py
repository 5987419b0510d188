"""Stage `base`: the student before its cold start (config section `student`).

A scratch student learns to solve problems one step after the other and has never seen a block; a hub student only gets its tags.
Deviates from the paper, which starts from Qwen3-4B-Base, in the scratch case only: it exists so that the pipeline runs anywhere.
"""

from __future__ import annotations

import random

from pydantic import TypeAdapter

from parallel_r1 import config as schema
from parallel_r1 import jobs, student
from parallel_r1.config import HubStudent, ScratchStudent, Student
from parallel_r1.markup import TAGS
from parallel_r1.problems import draw, read_problems
from parallel_r1.teacher import ScriptedTeacher
from parallel_r1.training import runs, supervised

TOKENIZER_TEXTS = 3000


def main() -> None:
    """Run one job."""
    job = jobs.read_job()
    runs.quiet(job.threads)
    config = TypeAdapter(Student).validate_python(job.config)
    metrics = _from_scratch(job, config) if isinstance(config, ScratchStudent) else _from_hub(job, config)
    jobs.finish(metrics)


def _from_scratch(job: jobs.Job, config: ScratchStudent) -> dict[str, float]:
    sets = {name: read_problems(job.inputs[name] / jobs.PROBLEMS) for name in config.problems}
    problems = draw(sets, config.problems, config.examples, job.seed)
    teacher = ScriptedTeacher(schema.ScriptedTeacher())
    rng = random.Random(job.seed)
    solutions = [{"problem": problem.problem, "text": teacher.sequential(problem, rng)} for problem in problems]
    sample = solutions[:TOKENIZER_TEXTS]
    words = [_without_tags(teacher.trajectory(problem, rng)) for problem in problems[:TOKENIZER_TEXTS]]
    tokenizer = student.train_tokenizer([f"{row['problem']}\n{row['text']}" for row in sample] + words, config.vocab_size)
    model = student.scratch_model(config, tokenizer, job.seed)
    jobs.note(f"scratch student: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    dataset, _ = supervised.examples(tokenizer, solutions, "bare", config.max_position)
    metrics = supervised.train(job, model, tokenizer, dataset, config, config.steps, config.batch_size)
    return {**metrics, "parameters": model.num_parameters(), "vocabulary": len(tokenizer)}


def _without_tags(text: str) -> str:
    for tag in TAGS:
        text = text.replace(tag, " ")
    return text


def _from_hub(job: jobs.Job, config: HubStudent) -> dict[str, float]:
    model, tokenizer, new_tags = student.hub_student(config, job.seed)
    student.save(model, tokenizer, job.out / "checkpoint")
    return {"parameters": model.num_parameters(), "vocabulary": len(tokenizer), "new_tags": len(new_tags)}


if __name__ == "__main__":
    main()
