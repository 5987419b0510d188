"""Stage `generate` with a teacher of its own (config `generate.teacher`, type served): starts a vLLM server, asks it, and ends it."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from parallel_r1 import jobs
from parallel_r1.config import GenerateConfig, RolloutConfig, ServedTeacher
from parallel_r1.problems import read_problems
from parallel_r1.rollout.serve import serve
from parallel_r1.served import Book, Endpoint
from parallel_r1.teacher import ask, written_metrics


def main() -> None:
    """Run one job: inputs are the training sets by name."""
    job = jobs.read_job()
    config = GenerateConfig.model_validate(job.config)
    teacher = config.teacher
    assert isinstance(teacher, ServedTeacher)
    sets = {name: read_problems(job.inputs[name] / jobs.PROBLEMS) for name in config.problems}
    room = RolloutConfig(
        max_prompt_tokens=teacher.max_prompt_tokens,
        max_response_tokens=teacher.max_tokens,
        max_in_flight=teacher.concurrency * teacher.samples,
    )
    folder = Path(teacher.model) if Path(teacher.model).is_dir() else Path(snapshot_download(teacher.model, revision=teacher.revision))
    jobs.note(f"starting a vLLM server of {teacher.model}")
    with serve(folder, room, job.seed, job.threads) as server:
        # vLLM's CPU sampler fails on seeds of requests with chunked prefill
        endpoint = Endpoint(f"{server.url}/v1", str(folder), seeded=torch.cuda.is_available(), filed_as="served here")
        rows, metrics = ask(config, endpoint, sets, job.seed, Book(job.work / "answers", "answers"), jobs.report_progress)
    jobs.append_lines(job.out / jobs.TRAJECTORIES, rows)
    jobs.finish(written_metrics(rows) | metrics)


if __name__ == "__main__":
    main()
