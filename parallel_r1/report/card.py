"""The model card of an exported checkpoint: README.md with front matter for the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from parallel_r1 import prompts
from parallel_r1.config import Prompt
from parallel_r1.jobs import read_lines
from parallel_r1.provenance import LICENCES, History, TrainingSet, in_words
from parallel_r1.report.inputs import Evaluation
from parallel_r1.report.numbers import duration
from parallel_r1.report.tables import as_markdown, results
from parallel_r1.store import Manifest

RECIPE_FILE = "recipe.yaml"
NOT_KNOWN = "see its page"
STYLES = ("bare", "plain", "parallel")
SNIPPETS = Path(__file__).parent
BUDGETS = ("num_paths", "max_blocks", "max_prompt_tokens", "max_response_tokens", "max_path_tokens", "max_summary_tokens")


@dataclass(frozen=True)
class Measured:
    """Files of the checkpoint's evaluation."""

    results: dict[str, Any]
    rollouts: Path


@dataclass(frozen=True)
class Facts:
    """What the card says and manifests don't."""

    name: str
    """Of the folder or repository."""
    parameters: int
    architecture: str
    own_template: bool
    """Whether the chat template came with the base model."""
    licence: str | None


def build(history: History, prompt: Prompt, measured: Measured | None, facts: Facts) -> str:
    """The card's text."""
    environment = Environment(loader=FileSystemLoader(SNIPPETS), undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True)
    template = prompts.template(prompt)
    evaluation = history.evaluation
    values = {
        "front_matter": _front_matter(history, measured, facts),
        "name": facts.name,
        "opening": _opening(history, facts),
        "sample": _sample(measured) if measured else "",
        "results": as_markdown(results([Evaluation(history.label(history.name), measured.results)])) if measured else "",
        "engine": measured.results["engine"] if measured else "",
        "given_away": _given_away(measured) if measured else "",
        "rollout": evaluation[1].config["rollout"] if evaluation else {},
        "template": "the base model's own" if facts.own_template else "the prompt itself, nothing around it",
        "prompt": template.rstrip("\n"),
        "attention": history.attention,
        "alone": _snippet("transformers_alone.py.txt", template, history),
        "engine_snippet": _snippet("by_engine.py.txt", template, history),
        "ask": _ask(prompt, history.attention),
        "stages": [_stage(history, name, manifest) for name, manifest in _stages(history)],
        "recipe_file": RECIPE_FILE,
        "by_content": "sha256:" in json.dumps(history.recipe()),
        "data": [*map(_data_row, history.training_sets), *_trajectories(history)],
        "compared": _compared(history),
        "limits": list(_limits(history, measured, facts)),
        "versions": ", ".join(f"{name} {number}" for name, number in history.manifest.versions.items() if name not in ("stage", "prompt")),
    }
    return environment.get_template("card.md.j2").render(values)


def _front_matter(history: History, measured: Measured | None, facts: Facts) -> str:
    scores = [
        EvalResult(
            task_type="text-generation", dataset_type=name.lower(), dataset_name=name, metric_type="accuracy",
            metric_name=f"mean@{entry['samples']}", metric_value=round(100 * entry["metrics"]["mean"]["value"], 2),
        )
        for name, entry in (measured.results["sets"].items() if measured else ())
    ]  # fmt: skip
    data = ModelCardData(
        language="en", license=facts.licence, library_name="transformers", pipeline_tag="text-generation",
        tags=["parallel-thinking", "parallel-r1", "arxiv:2509.07980"], base_model=history.base_model,
        datasets=list(history.hub_names()) or None, model_name=facts.name, eval_results=scores or None,
    )  # fmt: skip
    return data.to_yaml()


def _opening(history: History, facts: Facts) -> str:
    began = f"[{history.base_model}](https://huggingface.co/{history.base_model})" if history.base_model else "a model made from scratch"
    if not history.base_model and history.chain[0][1].config.get("type") == "hub":
        began = "a checkpoint from a folder"
    steps = ", then ".join(history.label(name) for name, _ in history.chain[1:])
    model = f"A {facts.architecture} with {facts.parameters:,} parameters: {began}"
    if not steps:
        return f"{model}, with the six tags of parallel thinking as tokens. It was not trained to use them yet."
    return (
        f"{model}, trained by {steps}. It thinks in parallel: where several lines of thought help, it opens a block of paths that don't "
        "see each other, sums them up, and goes on."
    )


def _sample(measured: Measured) -> str:
    """The first right response with a faultless block; nothing where there is none."""
    rows = (row for row in read_lines(measured.rollouts) if row["correct"] and row["well_formed"] and row["blocks"])
    return next((f"{row['problem']}\n\n{row['text']}".replace("```", "'''") for row in rows), "")


def _given_away(measured: Measured) -> str:
    sets = measured.results["sets"].items()
    clean = ((name, entry["problems"] - entry["clean"]["problems"]) for name, entry in sets if entry.get("clean"))
    return ", ".join(f"{count} of {name}" for name, count in clean if count)


def _snippet(file: str, template: str, history: History) -> str:
    """A program of the card: a file beside this one, with the checkpoint's own prompt and budgets in place of its placeholders."""
    rollout = (history.evaluation[1].config if history.evaluation else {}).get("rollout", {})
    settings = {"attention": history.attention, "engine": "transformers"} | {name: rollout.get(name) for name in BUDGETS}
    spelled = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None)
    text = (SNIPPETS / file).read_text(encoding="utf-8")
    text = text.replace('"PROMPT {problem}"', json.dumps(template, ensure_ascii=False))
    text = text.replace(
        "paths: int = 2, blocks: int = 4", f"paths: int = {rollout.get('num_paths', 2)}, blocks: int = {rollout.get('max_blocks', 4)}"
    )
    return text.replace("SETTINGS", spelled).rstrip()


def _ask(prompt: Prompt, attention: str) -> str:
    parts = [f'ASK="--prompt {prompt}"'] if prompt in STYLES else []
    return " ".join(parts + ['SET="attention=structured"'] * (attention == "structured"))


def _stages(history: History) -> Iterator[tuple[tuple[str, str], Manifest]]:
    for stage in ("generate", "filter"):
        if found := history.stage(stage):
            yield (stage, found.key), found
    yield from history.chain


def _stage(history: History, name: tuple[str, str], manifest: Manifest) -> dict[str, str]:
    return {"label": history.label(name), "what": _what(manifest), "time": duration(manifest.seconds)}


def _what(manifest: Manifest) -> str:
    config, metrics = manifest.config, manifest.metrics
    match manifest.stage:
        case "generate":
            return f"{metrics['trajectories']:,.0f} trajectories by {_teacher(config['teacher'])}"
        case "filter":
            rejected = ((in_words(code, "rejected_"), count) for code, count in metrics.items() if code.startswith("rejected_"))
            faults = ", ".join(f"{fault} {count:.0f}" for fault, count in rejected)
            return f"{metrics['kept']:,.0f} of {metrics['seen']:,.0f} kept; rejected for {faults or 'nothing'}"
        case "base":
            return f"{config['type']} student, {metrics.get('parameters', 0):,.0f} parameters"
        case "sft":
            return f"{metrics['steps']:.0f} steps of {config['batch_size']} trajectories, {_how(config)}"
        case _:
            group = f"{config['prompts_per_step']} problems x {config['rollouts_per_prompt']} rollouts"
            return f"GRPO, reward {config['reward']}, {config['steps']} steps of {group}, {_how(config)}"


def _how(config: Mapping[str, Any]) -> str:
    lora = f"LoRA of rank {config['lora']['r']}, merged" if config.get("lora") else "all weights"
    return f"learning rate {config['optimizer']['learning_rate']:g}, {lora}"


def _teacher(teacher: Mapping[str, Any]) -> str:
    named = {"scripted": "a program, not a model", "files": "a file of trajectories", "hub": f"the data set {teacher.get('name')}"}
    model = "a checkpoint from a folder" if str(teacher.get("model")).startswith("sha256:") else str(teacher.get("model"))
    return named.get(teacher["type"], model)


def _data_row(one: TrainingSet) -> dict[str, Any]:
    removed = ", ".join(f"{count:,} {reason}" for reason, count in one.removed.items()) or "nothing"
    told = {"source": _source(one.source), "licence": _licence(one.source)}
    return {"name": one.name, **told, "used": f"{one.problems:,} problems", "removed": removed}


def _source(source: Mapping[str, Any]) -> str:
    match source["type"]:
        case "hub":
            return f"[{source['name']}](https://huggingface.co/datasets/{source['name']}), {source['split']}"
        case "files":
            return f"a file, {source['path'][:19]}"
        case "reasoning_gym":
            return f"reasoning-gym {source['dataset']}, made from a seed"
        case _:
            return f"word problems of tier {source['tier']}, made from a seed"


def _licence(source: Mapping[str, Any]) -> str:
    if source["type"] in ("hub", "openai", "served"):
        return LICENCES.get(source.get("name") or source.get("model", ""), NOT_KNOWN)
    return "not known: ask whoever made the file" if source["type"] == "files" else "none needed: made on the spot"


def _trajectories(history: History) -> Iterator[dict[str, Any]]:
    """What the teacher wrote, after the filter."""
    written, kept = history.stage("generate"), history.stage("filter")
    if written and kept:
        rejected = kept.metrics["seen"] - kept.metrics["kept"]
        copies = written.metrics["trajectories"] - kept.metrics["seen"]
        removed = f"{rejected:,.0f} by the filter" + (f", {copies:,.0f} copies of test items" if copies else "")
        teacher = written.config["teacher"]
        told = {"source": _teacher(teacher), "licence": _licence(teacher)}
        yield {"name": "trajectories", **told, "used": f"{kept.metrics['kept']:,.0f} trajectories", "removed": removed}


def _compared(history: History) -> str:
    if any("copies of test items" in one.removed for one in history.training_sets) or history.stage("decontaminate"):
        compared = "Training data was compared with the test sets by shared word sequences (`prepare.decontaminate`)"
        return f"{compared}; the table says what was taken out."
    if all(one.source["type"] in ("procedural", "reasoning_gym") for one in history.training_sets):
        return "Training and test problems are made by the same program and never share a combination of numbers."
    return "Training data was not compared with test sets."


def _limits(history: History, measured: Measured | None, facts: Facts) -> Iterator[str]:
    if all(one.source["type"] in ("procedural", "reasoning_gym") for one in history.training_sets) and history.training_sets:
        yield "It knows the made-up problems that it was trained on and nothing else: a demonstration, no assistant."
    else:
        yield "Trained on English mathematics problems with short answers; nothing else was measured."
    yield "An answer can be wrong however many paths agree. Nothing was done about safety beyond what the base model has."
    if history.attention == "structured":
        yield (
            "Trained with structured attention (paths see neither each other's text nor positions): a plain `generate` runs it causally, "
            "as it was never trained."
        )
    if (written := history.stage("generate")) and written.config["teacher"]["type"] == "scripted":
        yield "Its teacher was a program that stands in for a strong model."
    if measured is None:
        yield "It was not measured."
    else:
        yield "One seed. Intervals are over problems, not over training runs, which differ by more."
    if facts.licence is None:
        yield "No licence was chosen for these weights: mind those of the base model and the data before you pass them on."
