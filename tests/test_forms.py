"""Forms of the deployments: what they show, what they refuse, and what they become."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows import stages
from flows.experiments import experiments
from flows.forms import (
    SHIPPED,
    EvaluateForm,
    GenerateForm,
    PrepareForm,
    RlForm,
    RunForm,
    SftForm,
    config_of,
    filled_in,
    partial,
)
from flows.pipeline import pipeline
from parallel_r1.config import ConfigError, HubStudent, ScratchStudent, load
from tasks.places import PROJECT

FLOWS = {
    flow.name: flow
    for flow in (
        pipeline, experiments, stages.prepare, stages.base, stages.generate, stages.filter_trajectories, stages.sft, stages.rl,
        stages.evaluate,
        stages.analysis, stages.report,
    )
}  # fmt: skip
DEMO = "pipeline_config.yaml"


def schema_of(name: str) -> dict[str, Any]:
    return FLOWS[name].parameters.model_dump()


@pytest.mark.parametrize("name", FLOWS)
def test_every_field_is_described_and_every_optional_one_has_a_title(name: str) -> None:
    schema = schema_of(name)
    for title, field in schema["properties"].items():
        assert field["description"] and field["title"] == title
    for model, definition in schema["definitions"].items():
        for field, shape in definition.get("properties", {}).items():
            assert shape.get("title"), f"{model}.{field}"
            pointed_at = schema["definitions"].get(shape.get("$ref", "").rsplit("/", 1)[-1], {})
            assert shape.get("description") or pointed_at.get("description"), f"{model}.{field}"
            assert shape.get("default", "left out") is not None, "no null as default"


@pytest.mark.parametrize("name", FLOWS)
def test_the_empty_form_is_valid_and_changes_nothing(name: str) -> None:
    schema = schema_of(name)
    defaults = {field: shape["default"] for field, shape in schema["properties"].items()}
    validate(defaults, schema, raise_on_error=True)
    validate({}, schema, raise_on_error=True)
    sections = {"run": RunForm(), "sft": SftForm(), "rl": [], "student": None, "prepare": PrepareForm()}
    assert filled_in(DEMO, sections) == []


def test_a_form_reaches_stages_that_a_recipe_takes_from_the_one_it_extends() -> None:
    assert filled_in("recipes/tiny/unseen_with_rl_easy.yaml", {"rl": [RlForm(), RlForm(steps=3)]}) == ["rl.1.steps=3"]
    with pytest.raises(ConfigError, match="2 entries in the form, 1 in the recipe"):
        filled_in("recipes/tiny/grpo_dapo.yaml", {"rl": [RlForm()] * 2})


def test_enums_are_drop_downs_and_defaults_are_named() -> None:
    schema = schema_of("sft")
    sft = schema["definitions"]["SftForm"]["properties"]
    assert sft["attention"]["enum"] == ["causal", "structured"]
    assert "(default 128)" in sft["batch_size"]["description"] and "(default none)" in sft["max_steps"]["description"]
    shipped, own = schema["properties"]["recipe"]["anyOf"]
    assert shipped["enum"] == list(SHIPPED) and "recipes/smoke.yaml" in shipped["enum"]
    assert own["type"] == "string"


@pytest.mark.parametrize("name, parameters, field, reason", [
    ("sft", {"sft": {"max_steps": 0}}, "sft.max_steps", "out of bounds"),
    ("sft", {"sft": {"optimizer": {"learning_rate": "fast"}}}, "sft.optimizer.learning_rate", "another type, deep inside"),
    ("sft", {"sft": {"attention": "dense"}}, "sft.attention", "not in the drop-down"),
    ("sft", {"sft": {"stepz": 3}}, "stepz", "an unknown field"),
    ("sft", {"recipe": "recipes/none.txt"}, "recipe", "not a config file"),
    ("sft", {"overrides": ["sft.max_steps"]}, "overrides[0]", "an override without a value"),
    ("sft", {"force": "yes"}, "force", "not a boolean"),
    ("sft", {"upstream": {"base": "filter/0123456789"}}, "upstream.base", "an artifact of another stage"),
    ("sft", {"upstream": {"base": "base/../../etc"}}, "upstream.base", "a path"),
    ("rl", {"rl": {"reward": "applause"}}, "rl.reward", "not in the drop-down"),
    ("rl", {"stages": -1}, "stages", "out of bounds"),
    ("evaluate", {"evaluate": {"rollout": {"num_paths": 1}}}, "evaluate.rollout.num_paths", "out of bounds"),
    ("base", {"student": {"type": "scratch", "head_dim": 24}}, "student", "of one member of a union"),
    ("parallel-r1", {"place": "there"}, "place", "not in the drop-down"),
    ("parallel-r1", {"force": ["sft", "all"]}, "force[1]", "no stage"),
    ("parallel-r1", {"rl": [{"steps": 0}]}, "rl[0].steps", "in a list"),
    ("prepare", {"run": {"seed": -1}}, "run.seed", "out of bounds"),
])  # fmt: skip
def test_a_bad_value_is_refused_at_creation_with_its_name(name: str, parameters: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validate(parameters, schema_of(name), raise_on_error=True)
    assert field in str(refused.value), reason


@pytest.mark.parametrize("sections, expected, reason", [
    ({"sft": SftForm(max_steps=3)}, ["sft.max_steps=3"], "one field"),
    ({"sft": {}}, [], "nothing"),
    ({"sft": SftForm(optimizer={"learning_rate": 1e-5})}, ["sft.optimizer.learning_rate=1.0e-05"], "YAML takes 1e-5 for a text"),
    ({"run": RunForm(seed=3, resources={"threads": 2})}, ["seed=3", "resources.threads=2"], "fields at the top"),
    ({"rl": [RlForm(), RlForm(steps=3)]}, ["rl.1.steps=3"], "the second stage of a curriculum"),
    ({"generate": GenerateForm(problems={"tier1": 1.0})}, ["generate.problems={tier1: 1.0}"], "a mixture is one value"),
    ({"generate": GenerateForm(teacher={"type": "scripted", "slip_rate": 0.1})}, ["generate.teacher.slip_rate=0.1"], "the same member"),
    ({"generate": GenerateForm(teacher={"type": "files", "path": "a b.jsonl"})}, ["generate.teacher={path: a b.jsonl, type: files}"],
     "another member of the union: nothing of the old one stays"),
    ({"student": partial(ScratchStudent)(type="scratch", examples=4)}, ["student.examples=4"], "the recipe's own kind of student"),
    ({"student": partial(HubStudent)(type="hub", name="a: b")}, ["student={name: 'a: b', type: hub}"], "another kind"),
    ({"prepare": PrepareForm(train={"tier1": {"type": "procedural", "count": 3}})}, ["prepare.train.tier1.count=3"], "a set by name"),
    ({"evaluate": EvaluateForm(samples={"tier1": 2})}, ["evaluate.samples={tier1: 2}"], "a mapping of numbers is one value"),
])  # fmt: skip
def test_what_is_filled_in_becomes_overrides(sections: dict[str, Any], expected: list[str], reason: str) -> None:
    assert filled_in(DEMO, sections) == expected, reason


def test_dotted_overrides_win_over_the_form_and_both_over_the_recipe() -> None:
    sections = {"sft": SftForm(max_steps=3, epochs=2)}
    config = config_of(DEMO, ["sft.max_steps=5"], sections)
    assert (config.sft.max_steps, config.sft.epochs) == (5, 2)
    assert config.sft.batch_size == load(PROJECT / DEMO).sft.batch_size


def test_what_only_the_whole_shows_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size 16 does not divide the batch of 7"):
        config_of(DEMO, [], {"sft": SftForm(batch_size=7)})
    with pytest.raises(ConfigError, match="3 entries in the form, 2 in the recipe"):
        filled_in(DEMO, {"rl": [RlForm(), RlForm(), RlForm(steps=1)]})
