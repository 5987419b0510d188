"""The schema: every shipped file parses, and whatever is wrong with a file is said in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_r1 import config
from parallel_r1.config import ConfigError, PipelineConfig, load
from parallel_r1.store import identity

ROOT = Path(__file__).parents[1]
SHIPPED = [ROOT / "pipeline_config.yaml", *sorted(ROOT.glob("recipes/**/*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_config_parses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/some/folder")
    monkeypatch.setenv("TEACHER", "/some/folder")
    assert load(path).name == {"pipeline_config": "demo"}.get(path.stem, path.stem), "a run is called as its file"


def test_defaults_are_the_papers() -> None:
    paper = PipelineConfig()
    assert (paper.sft.batch_size, paper.sft.optimizer.learning_rate, paper.sft.epochs) == (128, 1e-5, 1)
    hard = paper.rl[0]
    assert (hard.prompts_per_step, hard.rollouts_per_prompt, hard.steps, hard.optimizer.learning_rate) == (512, 8, 300, 1e-6)
    assert (hard.rollout.num_paths, hard.rollout.max_blocks, hard.rollout.max_response_tokens, hard.rollout.temperature) == (
        2,
        4,
        3000,
        1.0,
    )
    assert (hard.clip_low, hard.clip_high, hard.kl_coefficient) == (0.2, 0.2, 0)
    assert [paper.evaluate.samples_of(name) for name in ("AIME25", "MATH")] == [16, 1]


def described(section: type[config.Section]) -> set[str]:
    return {name for name, field in section.model_fields.items() if not field.description and name not in {"type", "optimizer", "rollout"}}


def sections(of: type[config.Section] = config.Section) -> list[type[config.Section]]:
    """Every section of the schema."""
    return [one for below in of.__subclasses__() if below.__module__ == config.__name__ for one in (below, *sections(below))]


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_says_what_it_is(section: type[config.Section]) -> None:
    if section is not PipelineConfig:
        assert described(section) <= {"teacher", "student"}


@pytest.mark.parametrize(
    ("override", "parts", "reason"),
    [
        ("rl.0.stepz=5", ["pipeline_config.yaml", "rl.0.stepz", "unknown key", "steps"], "an unknown key names the known ones"),
        ("rl.0.steps=many", ["rl.0.steps = 'many'", "integer"], "a wrong type names field and value"),
        (
            "rl.0.rollout.num_paths=1",
            ["rl.0.rollout.num_paths = 1", "greater than or equal to 2", "max_blocks: 0"],
            "a bound, and the way out",
        ),
        ("student.head_dim=24", ["student.head_dim = 24", "32, 64 or 128"], "what is allowed"),
        ("sft.micro_batch_size=5", ["sft", "does not divide the batch of 16"], "a check across fields"),
        ("sft.launch.processes=2", ["sft", "16 x launch.processes 2 does not divide", "micro_batch_size: 8"], "a share for each"),
        ("sft.launch.processes=3", ["sft", "16 can't be shared by 3 processes"], "no equal shares"),
        ("launch={processes: 2, machines: 2}", ["launch", "need main_address", "prefix"], "machines that could not meet"),
        ("rl.0.launch={processes: 3, machines: 2}", ["rl.0.launch", "processes 3 can't be shared equally"], "unequal machines"),
        ("rl.0.rollout.temperature=0.6", ["rl.0", "temperature 0.6", "set both to 1"], "rl must train what it samples"),
        ("evaluate.sets=[tier9]", ["evaluate.sets", "tier9", "tier1, tier2, tier3"], "a set that is not there"),
        ("rl.0.problems={tier9: 1.0}", ["rl.0.problems", "tier9"], "a mixture of a set that is not there"),
        ("generate=null", ["sft and generate"], "half a cold start"),
        ("generate.teacher.type=oracle", ["generate.teacher", "oracle", "scripted"], "an unknown member of a union"),
        ("rl.7.steps=1", ["SET", "7", "list of 2"], "a list entry that is not there"),
        ("rl.0.steps", ["SET", "dotted.field=value"], "no value"),
        ("name.first=x", ["SET", "no fields"], "a field below a plain value"),
        ("rl.0.lora={dropout: 0.1}", ["rl.0: lora.dropout 0.1", "set 0"], "dropout would train another policy than the sampled one"),
        ("generate.teacher={type: openai, max_cost: 5}", ["generate.teacher: max_cost 5", "prompt_price"], "a limit without prices"),
    ],
)
def test_errors_say_what_where_and_the_way_out(override: str, parts: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "pipeline_config.yaml", [override])
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], f"{reason}: {message}"
    assert len(message.splitlines()) == 1, f"one fault, one line: {message}"


def test_all_faults_of_a_file_are_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "pipeline_config.yaml", ["rl.0.steps=0", "sft.epochs=-1"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "part"),
    [("a: [", "can't be read as YAML"), ("- 1", "mapping of sections"), ("name: ${NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE is not set")],
)
def test_files_that_are_no_configs(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part) as caught:
        load(path)
    assert "broken.yaml" in str(caught.value)


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: no such file"):
        load("nowhere.yaml")


def test_overrides_reach_defaults_that_the_file_leaves_out() -> None:
    changed = load(ROOT / "pipeline_config.yaml", ["resources.threads=2", "store=s3://bucket/x", "rl.1.steps=5"])
    assert (changed.resources.threads, changed.store, changed.rl[1].steps) == (2, "s3://bucket/x", 5)


def test_stages_are_launched_as_the_top_says_unless_they_say_otherwise() -> None:
    fitting = ["sft.micro_batch_size=8"]
    changed = load(ROOT / "pipeline_config.yaml", ["launch.processes=2", "launch.strategy=fsdp2", "rl.1.launch={strategy: ddp}", *fitting])
    launches = [(stage.launch.processes, stage.launch.strategy) for stage in (changed.sft, *changed.rl)]
    assert launches == [(2, "fsdp2"), (2, "fsdp2"), (2, "ddp")]
    plain = load(ROOT / "pipeline_config.yaml", fitting)
    assert identity(changed) == identity(plain), "how many processes is in no cache key"


def test_adapters_are_not_split_by_zero3() -> None:
    split = ["sft.launch={processes: 2, strategy: zero3}", "sft.micro_batch_size=8"]
    assert load(ROOT / "pipeline_config.yaml", split).sft.launch.strategy == "zero3"
    with pytest.raises(ConfigError, match="sft: launch.strategy zero3 splits adapters.*set launch.strategy: fsdp2 or ddp"):
        load(ROOT / "pipeline_config.yaml", [*split, "sft.lora={r: 4}"])


# --- files that extend another --------------------------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> Path:
    """YAML files by name; gives the last one's path."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


def test_the_unseen_demo_is_the_demo_with_another_attention() -> None:
    seen, unseen = load(ROOT / "pipeline_config.yaml"), load(ROOT / "recipes" / "demo_unseen.yaml")
    parts = (unseen.sft, unseen.evaluate.rollout, *(stage.rollout for stage in unseen.rl))
    assert {part.attention for part in parts} == {"structured"}
    assert load(ROOT / "pipeline_config.yaml", ["attention=structured", "name=demo_unseen"]) == unseen
    assert (seen.prepare, seen.student, seen.generate, seen.filter) == (unseen.prepare, unseen.student, unseen.generate, unseen.filter), (
        "shared"
    )


BASE = """
prepare: {train: {a: {type: procedural, tier: 1, count: 5}}, evaluation: {b: {type: procedural, tier: 1, count: 5}}}
student: {type: scratch, problems: {a: 1.0}, hidden_size: 64}
generate: {problems: {a: 1.0}, teacher: {type: scripted, slip_rate: 0.2}}
rl: [{name: one, problems: {a: 1.0}, steps: 3}, {name: two, problems: {a: 1.0}}]
"""


@pytest.mark.parametrize(
    ("changes", "path", "expected", "reason"),
    [
        ("student: {hidden_size: 128}", "student.hidden_size", 128, "a value of a mapping is changed"),
        ("student: {hidden_size: 128}", "student.problems", {"a": 1.0}, "what stands beside it stays"),
        ("generate: {teacher: {type: openai}}", "generate.teacher.type", "openai", "another type takes nothing over"),
        ("generate: {teacher: {slip_rate: 0.3}}", "generate.teacher.type", "scripted", "the type may be left out"),
        ("rl: [{name: other, problems: {a: 1.0}}]", "rl", ["other"], "lists are replaced"),
        ("generate: null\nsft: null", "generate", None, "null switches a section off"),
        ("name: x", "rl", ["one", "two"], "what isn't named stays"),
    ],
)
def test_a_file_holds_what_differs_from_the_one_it_extends(changes: str, path: str, expected: object, reason: str, tmp_path: Path) -> None:
    found: object = load(write(tmp_path, base=BASE, middle="extends: base.yaml\nseed: 3", top=f"extends: middle.yaml\n{changes}"))
    assert found.seed == 3
    for part in path.split("."):
        found = getattr(found, part)
    assert ([stage.name for stage in found] if path == "rl" else found) == expected, reason


DEFAULTS = "rl_defaults: {steps: 7, problems: {a: 1.0}, rollout: {max_blocks: 1}}"


@pytest.mark.parametrize(
    ("entry", "expected", "reason"),
    [
        ("{name: x}", (7, 1, 2), "what an entry leaves out"),
        ("{name: x, steps: 9}", (9, 1, 2), "what an entry says wins"),
        ("{name: x, rollout: {num_paths: 3}}", (7, 1, 3), "mappings are merged"),
    ],
)
def test_rl_defaults_hold_for_every_stage_of_every_file_that_extends_theirs(
    entry: str, expected: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    config = load(write(tmp_path, base=BASE, middle=f"extends: base.yaml\n{DEFAULTS}", top=f"extends: middle.yaml\nrl: [{entry}]"))
    [stage] = config.rl
    assert (stage.steps, stage.rollout.max_blocks, stage.rollout.num_paths) == expected, reason


@pytest.mark.parametrize(
    ("texts", "parts", "reason"),
    [
        ({"top": "rl_defaults: [1]"}, ["top.yaml: rl_defaults = [1]", "a mapping"], "no mapping"),
        ({"top": "extends: gone.yaml"}, ["gone.yaml: no such file", "named by `extends` in", "top.yaml"], "both files are named"),
        ({"top": "extends: top.yaml"}, ["top.yaml: extends = 'top.yaml'", "circle"], "itself"),
        ({"a": "extends: ./top.yaml", "top": "extends: a.yaml"}, ["a.yaml: extends", "circle", "top.yaml -> "], "by way of another"),
        ({"top": "extends: [a, b]"}, ["top.yaml: extends = ['a', 'b']", "one file"], "several"),
        ({"a": "- 1", "top": "extends: a.yaml"}, ["a.yaml", "mapping of sections"], "what is extended must be a config"),
        ({"a": "seed: ${NOT_SET_ANYWHERE}", "top": "extends: a.yaml"}, ["a.yaml", "NOT_SET_ANYWHERE"], "the file that holds the value"),
    ],
)
def test_extending_goes_wrong_with_both_files_named(texts: dict[str, str], parts: list[str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, **texts))
    assert [part for part in parts if part not in str(caught.value)] == [], f"{reason}: {caught.value}"


def test_a_student_without_a_type_is_one_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\n")
    assert load(tmp_path / "x.yaml", ["student.name=Qwen/Qwen3-0.6B-Base"]).student.name == "Qwen/Qwen3-0.6B-Base"


def test_an_empty_variable_is_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """make hands DATA on even where nobody set it."""
    monkeypatch.setenv("DATA", "")
    (tmp_path / "x.yaml").write_text("name: x\nprepare: {train: {a: {type: files, path: '${DATA}/a.jsonl'}}}\n")
    with pytest.raises(ConfigError, match="DATA is not set; pass it"):
        load(tmp_path / "x.yaml")
