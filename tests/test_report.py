"""The report: what it says, what it must never say, and that hostile text stays text."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel_r1 import config as schema
from parallel_r1 import published
from parallel_r1.analysis import analyse
from parallel_r1.metrics import summarise
from parallel_r1.report import Curve, Evaluation, ReportInput, StageRun, build, results_table
from parallel_r1.report import tables
from parallel_r1.report.numbers import Estimate, duration, mean_of, signed, written
from parallel_r1.report.outcome import Change
from parallel_r1.report.rollouts import Block, Main, lay_out, shown

ROOT = Path(__file__).parents[1]
HOSTILE = '<script>alert(1)</script></div><img src="http://evil/x.png" onerror=x> </details>'
HOSTILE += "\x00\x1b[31m \u202e \ud800 | `x` {{ 7*7 }} </style> $\\nope$"
LEVELS = {"base": (0.8, 0.62, 0.55), "sft": (0.86, 0.72, 0.42), "rl easy": (0.86, 0.75, 0.52), "rl hard": (0.85, 0.86, 0.79)}
FORM = {"base": (0.0, 0.0), "sft": (0.9, 0.84), "rl easy": (0.97, 0.93), "rl hard": (1.0, 0.98)}


# --- a run of the right shape ---------------------------------------------------------------------------------------------


def share(value: float, count: int) -> dict[str, float]:
    """A metric of results.json."""
    half = 1.96 * math.sqrt(max(value * (1 - value), 0) / count)
    return {"value": value, "low": max(0.0, value - half), "high": min(1.0, value + half)}


def rollout(name: str, problem: int, sample: int, correct: bool, block: bool) -> dict[str, Any]:
    """A Rollout row of the contract."""
    path = "In order. 12+5=17;17-3=14."
    segments = [{"kind": "main", "block": None, "path": None, "text": "Start 12, +5, -3.\n" if block else f"{path}\nFinal Answer: 14"}]
    if block:
        segments += [{"kind": "path", "block": 0, "path": 0, "text": path}]
        segments += [{"kind": "path", "block": 0, "path": 1, "text": "Gains first. 12+5=17;17-3=" + ("14." if correct else "15.")}]
        said = "Both give 14." if correct else "One gives 14, one gives 15. Take 15."
        segments += [{"kind": "summary", "block": 0, "path": None, "text": said}]
        segments += [{"kind": "main", "block": None, "path": None, "text": f"\nFinal Answer: {14 if correct else 15}"}]
    return {
        "set": name, "problem_id": f"{name}-{problem}", "problem": "Tom has 12 apples. He buys 5. Then he loses 3. How many apples now?",
        "answer": "14", "sample": sample, "text": "".join(part["text"] for part in segments), "segments": segments, "correct": correct,
        "extracted": "14" if correct else "15", "blocks": int(block), "well_formed": block, "faults": [], "finish": "eos",
        "tokens": 72 if block else 35, "critical_path_tokens": 48 if block else 35, "position": 0.06 if block else None, "path_similarity": 0.1,
    }  # fmt: skip


def evaluation(folder: Path, label: str, names: tuple[str, ...] = ("tier1", "tier2", "tier3"), problems: int = 60) -> Evaluation:
    """A checkpoint's results and rollouts that agree with each other."""
    random.seed(label)
    parallel, valid = FORM.get(label, (0.5, 0.4))
    sets, rows = {}, []
    for name, level in zip(names, (*LEVELS.get(label, (0.3, 0.2, 0.1)), 0.2, 0.2, 0.2), strict=False):
        chances = [min(1.0, max(0.0, random.gauss(level, 0.15))) for _ in range(problems)]
        mine = [rollout(name, i, k, random.random() < chances[i], random.random() < valid) for i in range(problems) for k in range(4)]
        mean = sum(row["correct"] for row in mine) / len(mine)
        shares = {"mean": mean, "pass@k": 1 - (1 - mean) ** 3, "parallel_ratio": parallel, "valid_ratio": valid, "truncated_ratio": 0.01}
        metrics = {metric: share(value, problems) for metric, value in shares.items()}
        metrics["response_tokens"] = {"value": 71.2, "low": 70.1, "high": 72.0}
        metrics["critical_path_tokens"] = {"value": 47.9, "low": 47.0, "high": 49.0}
        sets[name] = {"problems": problems, "samples": 4, "metrics": metrics}
        rows += mine
    path = write(folder / f"rollouts-{label}.jsonl", rows)
    speed = {"engine": "vllm 0.31.0", "seconds": 12.0, "sampled_tokens": 38_525, "tokens_per_second": 3210.4}
    return Evaluation(label, speed | {"sets": sets}, path)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as jsonl, as the stages write it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rl_steps(steps: int, start: float, end: float) -> list[dict[str, Any]]:
    """metrics.jsonl of an rl stage."""
    rows = []
    for step in range(1, steps + 1):
        level = start + (end - start) * step / steps + random.gauss(0, 0.04)
        row: dict[str, Any] = {"step": step, "loss": random.gauss(0, 0.01), "reward": 2 * level - 1, "accuracy": level}
        row |= {"parallel_ratio": 0.97, "valid_ratio": 0.9 + 0.08 * step / steps, "truncated_ratio": 0.01}
        row |= {"parallel_position": 0.06 - 0.001 * step, "blocks_per_response": 1.1, "path_similarity": 0.3}
        row |= {"response_tokens": 75 - step / 10, "entropy": 0.5 - 0.3 * step / steps}
        for kind in ("main", "path_1", "path_n", "summary"):
            row |= {f"rollout_gap/{kind}/mean": random.uniform(1, 3) * 1e-7, f"rollout_gap/{kind}/max": random.uniform(1, 4) * 1e-6}
        rows.append(row)
    return rows


def demo(folder: Path) -> ReportInput:
    """A whole run of the embedded default."""
    random.seed(1)
    loss = [[{"step": i, "loss": 3 * math.exp(-i / 90) + 0.3 + random.gauss(0, 0.02)} for i in range(1, n + 1)] for n in (850, 450)]
    versions = {"torch": "2.9.0", "transformers": "5.3.0", "trl": "1.2.0", "vllm": "0.31.0", "python": "3.11.9"}
    built = [
        ("prepare", "tier1", 0.4), ("prepare", "tier2", 0.4), ("base", "base", 58.2), ("generate", "generate", 2.1),
        ("filter", "filter", 1.9), ("sft", "sft", 61.4), ("rl", "rl easy", 44.0), ("rl", "rl hard", 161.0),
        ("evaluate", "base", 21.0), ("evaluate", "rl hard", 25.0),
    ]  # fmt: skip
    stages = [
        StageRun(stage, label, f"{i:02d}c0ffee5eed1234deadbeef", seconds, versions, {"tokens_per_second": 4321.0} if stage == "sft" else {})
        for i, (stage, label, seconds) in enumerate(built)
    ]
    curves = [
        Curve("base", write(folder / "base.jsonl", loss[0])),
        Curve("sft", write(folder / "sft.jsonl", loss[1])),
        Curve("rl easy", write(folder / "easy.jsonl", rl_steps(10, 0.6, 0.75))),
        Curve("rl hard", write(folder / "hard.jsonl", rl_steps(40, 0.5, 0.85))),
    ]
    faults = {"rejected_unclosed_path": 213, "rejected_no_summary": 208, "rejected_wrong_answer": 431, "rejected_cut": 395}
    funnel = {"seen": 8450, "kept": 7203, **faults}
    evaluations = [evaluation(folder, label) for label in LEVELS]
    config = schema.load(ROOT / "pipeline_config.yaml")
    return ReportInput("demo", config, stages, evaluations, curves, funnel, analysed(folder, curves, evaluations, config))


def analysed(folder: Path, curves: list[Curve], evaluations: list[Evaluation], config: schema.PipelineConfig) -> dict[str, Any]:
    """What the analysis stage finds in the run."""
    training, checkpoints = {}, {}
    for curve in curves[2:]:
        training[curve.label] = folder / curve.label
        kept = [
            rollout("train", step, sample, random.random() < 0.7, random.random() < 0.9) | {"step": step, "reward": 1.0}
            for step in range(1, len(list(curve.metrics.open())) + 1)
            for sample in range(8)
        ]
        training[curve.label].mkdir()
        write(training[curve.label] / "rollouts.jsonl", kept)
        (training[curve.label] / "metrics.jsonl").write_bytes(curve.metrics.read_bytes())
    for one in evaluations:
        checkpoints[one.label] = folder / f"evaluate {one.label}"
        checkpoints[one.label].mkdir()
        (checkpoints[one.label] / "rollouts.jsonl").write_bytes(one.rollouts.read_bytes())
    return analyse(training, checkpoints, config.analysis)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportInput:
    """The demo's run; read only."""
    return demo(tmp_path_factory.mktemp("report"))


# --- the page -------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Parses strictly enough to notice what a browser forgives: unclosed elements, ids used twice, targets that aren't there."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember it."""
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember it."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """It must close the innermost one."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Remember it."""
        self.words.append(data)

    def attributes(self, name: str) -> list[str]:
        """All values of an attribute."""
        return [attrs[name] or "" for _, attrs in self.tags if name in attrs]


def check_page(html: str) -> Page:
    """Nothing is loaded, nothing runs, and the page is well formed."""
    page = Page(html)
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed", "img", "base", "form"} == set()
    assert not page.attributes("src") and not page.attributes("srcset")
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert all(target.startswith(("#", "data:")) for target in page.attributes("href"))
    assert not any("url(" in value for _, attrs in page.tags for value in attrs.values() if value and not value.startswith("data:"))
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in page.attributes("href") if target.startswith("#")} <= set(ids)
    html.encode("utf-8")
    return page


def test_page_loads_nothing_and_holds_every_part(run: ReportInput) -> None:
    html = build(run).html
    page = check_page(html)
    assert [tag for tag, _ in page.tags].count("h1") == 1
    for section in ("results", "limits", "funnel", "curves", "analysis", "rollouts", "stages", "config"):
        assert section in page.attributes("id")
    pictures = [attrs for tag, attrs in page.tags if attrs.get("role") == "img"]
    assert len(pictures) == 3 + 2 + 9 + 5 + 3 and all(attrs["aria-label"] for attrs in pictures)
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in page.tags if tag == "th")
    assert "#0000" not in html, "a stand-in colour was left"


def test_same_run_gives_the_same_bytes(run: ReportInput) -> None:
    assert build(run) == build(run)


def test_hostile_text_is_shown_as_text(run: ReportInput, tmp_path: Path) -> None:
    row = rollout("tier1", 1, 0, True, True) | dict.fromkeys(("problem", "answer", "extracted", "set", "problem_id"), HOSTILE)
    row["faults"] = [HOSTILE]
    for segment in row["segments"]:
        segment["text"] = HOSTILE
    sets = {HOSTILE: {"problems": 60, "samples": 1, "metrics": {"mean": share(0.5, 60)}}}
    hostile = Evaluation(HOSTILE, {"sets": sets}, write(tmp_path / "r.jsonl", [row]))
    stage = StageRun(HOSTILE, HOSTILE, HOSTILE, 1.0, {HOSTILE: HOSTILE})
    curve = Curve(HOSTILE, write(tmp_path / "m.jsonl", rl_steps(3, 0, 1)))
    other = Curve(HOSTILE + "2", write(tmp_path / "m2.jsonl", rl_steps(3, 0, 1)))
    loss = Curve(HOSTILE, write(tmp_path / "l.jsonl", [{"step": 1, "loss": 1.0}]))
    funnel = {"seen": 1, f"rejected_{HOSTILE}": 1}
    rows = {"base": [row | {"blocks": 0, "segments": []}] * 2, HOSTILE: [row | {"step": 1, "reward": 1.0}] * 2}
    for folder, found in rows.items():
        (tmp_path / folder[:4]).mkdir()
        write(tmp_path / folder[:4] / "rollouts.jsonl", found)
    write(tmp_path / HOSTILE[:4] / "metrics.jsonl", rl_steps(3, 0, 1))
    found = analyse({HOSTILE: tmp_path / HOSTILE[:4]}, {"base": tmp_path / "base", HOSTILE: tmp_path / HOSTILE[:4]}, run.config.analysis)
    assert found["paths"] and found["depth"] and found["trends"]
    made = build(replace(
        run, name=HOSTILE, evaluations=[hostile], stages=[stage], curves=[curve, other, loss], funnel=funnel, analysis=found,
    ))  # fmt: skip
    page = check_page(made.html)
    assert "<script>alert(1)</script>" in "".join(page.words) and "{{ 7*7 }}" in "".join(page.words)
    assert "\x00" not in made.html and "<script" not in made.markdown and "<img" not in made.markdown
    made.markdown.encode("utf-8")


@pytest.mark.parametrize("change, reason", [
    ({"evaluations": []}, "nothing evaluated"),
    ({"evaluations": [Evaluation("base", {})]}, "an evaluation without results"),
    ({"evaluations": [Evaluation("base", {"sets": {"t": {"problems": 30, "metrics": {}}}}, Path("/nowhere.jsonl"))]}, "nothing measured"),
    ({"stages": [], "curves": [], "funnel": None}, "nothing but results"),
    ({"funnel": {"seen": 0, "kept": 0}}, "an empty funnel divides nothing by zero"),
    ({"curves": [Curve("gone", Path("/nowhere.jsonl"))]}, "a curve that was not kept"),
    ({"analysis": None}, "a run before there was an analysis"),
    ({"analysis": analyse({}, {}, schema.AnalysisConfig())}, "an analysis of nothing"),
    ({"evaluations": [], "stages": [], "curves": [], "funnel": None, "analysis": None}, "nothing at all"),
])  # fmt: skip
def test_missing_parts_leave_a_whole_page(run: ReportInput, change: dict[str, Any], reason: str) -> None:
    made = build(replace(run, **change))
    check_page(made.html)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", made.markdown), reason
    results_table(change.get("evaluations", run.evaluations))


@pytest.mark.parametrize("changes, reason", [({"rl": []}, "no rl"), ({"rl": [], "sft": None, "generate": None}, "evaluate only")])
def test_shorter_pipelines(run: ReportInput, changes: dict[str, Any], reason: str) -> None:
    config = run.config.model_copy(update=changes)
    made = build(replace(run, config=config, evaluations=run.evaluations[:1], curves=run.curves[:1]))
    check_page(made.html)
    assert "Only one checkpoint was evaluated, base" in made.html, reason


def test_metrics_that_are_no_numbers(run: ReportInput, tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": None}, {"step": 3}, {"step": 4, "loss": 1.0}, {"step": 5, "loss": "x"}]
    never = [{"step": 1, "reward": math.nan, "rollout_gap/main/max": 0.0}]
    unknown = {"value": math.nan, "low": math.nan, "high": None}
    sets = {"tier1": {"problems": 60, "samples": 4, "metrics": {"mean": unknown, "valid_ratio": 0.5}}}
    curves = [Curve("sft", write(tmp_path / "a.jsonl", rows)), Curve("rl", write(tmp_path / "b.jsonl", never))]
    made = build(replace(run, curves=curves, evaluations=[run.evaluations[0], Evaluation("sft", {"sets": sets})]))
    check_page(made.html)
    json.dumps(made.results, allow_nan=False)
    nothing = {"value": None, "low": None, "high": None}
    assert {"checkpoint": "sft", "set": "tier1", "metric": "mean", "problems": 60, "samples": 4, **nothing} in made.results["rows"]


def test_broken_jsonl_names_file_and_line(run: ReportInput, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        build(replace(run, curves=[Curve("sft", path)]))


# --- what it claims -------------------------------------------------------------------------------------------------------


def lead(html: str) -> str:
    """The summary paragraph."""
    return re.search(r'<p class="lead">(.*?)</p>', html, re.DOTALL)[1]


def test_summary_says_what_rose_and_what_is_not_shown(run: ReportInput) -> None:
    said = lead(build(run).html)
    assert re.search(r"Against sft, the accuracy of rl hard is higher .*on tier3 by \d+\.\d points \(\+\d", said)
    assert "tier1" in said.split("the run shows no difference")[0].split("; on ")[-1], said
    assert "98.0\u00a0%" in said and "another seed" in said


def flat(label: str, mean: tuple[float, float, float], problems: int, name: str = "t") -> Evaluation:
    """A checkpoint without rollouts."""
    metrics = {"mean": dict(zip(("value", "low", "high"), mean, strict=True))}
    return Evaluation(label, {"sets": {name: {"problems": problems, "samples": 1, "metrics": metrics}}})


@pytest.mark.parametrize("before, after, problems, claim, reason", [
    ((0.2, 0.15, 0.25), (0.5, 0.45, 0.55), 100, "is higher", "intervals far apart"),
    ((0.5, 0.45, 0.55), (0.2, 0.15, 0.25), 100, "is lower", "a loss is said as plainly"),
    ((0.4, 0.3, 0.5), (0.45, 0.35, 0.55), 100, "shows no difference", "intervals overlap"),
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1, "too few for an interval", "one problem: no width is no certainty"),
    ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 100, "shows no difference", "nothing right before or after"),
    ((0.2, math.nan, math.nan), (0.9, math.nan, math.nan), 100, "no interval", "no intervals, no claim"),
])  # fmt: skip
def test_claims_need_intervals(run: ReportInput, before: tuple, after: tuple, problems: int, claim: str, reason: str) -> None:
    said = lead(build(replace(run, evaluations=[flat("sft", before, problems), flat("rl", after, problems)])).html)
    assert claim in said, reason
    assert claim.startswith("is ") or not re.search(r"\bis (higher|lower)\b", said), reason


def test_checkpoints_on_different_sets_are_not_compared(run: ReportInput) -> None:
    said = lead(build(replace(run, evaluations=[flat("sft", (0.1, 0, 0.2), 50, "a"), flat("rl", (0.9, 0.8, 1.0), 50, "b")])).html)
    assert "not measured on the same sets" in said


def test_paired_difference_uses_shared_problems(run: ReportInput, tmp_path: Path) -> None:
    rows = [[rollout("t", i, 0, i % 2 == 0 or better and i % 10 == 1, True) for i in range(200)] for better in (False, True)]
    sides = [flat(label, (0.5, 0.43, 0.57), 200) for label in ("sft", "rl")]
    paired = [replace(side, rollouts=write(tmp_path / f"{side.label}.jsonl", mine)) for side, mine in zip(sides, rows, strict=True)]
    assert "is higher on t by 10.0 points" in lead(build(replace(run, evaluations=paired)).html), "20 problems won, none lost"


@pytest.mark.parametrize("student, shown_on_page", [({"type": "scratch", "problems": {"tier1": 1.0}}, True), ({"type": "hub"}, False)])
def test_limits_of_the_demo_stand_only_on_its_page(run: ReportInput, student: dict[str, Any], shown_on_page: bool) -> None:
    raw = run.config.model_dump(mode="json") | {"student": student}
    made = build(replace(run, config=schema.parse(raw)))
    for phrase in ("parallel thinking beats sequential rl", "alternating reward keeps", "later place in the response"):
        assert (phrase in made.html) is shown_on_page and (phrase in made.markdown) is shown_on_page


# --- tables ---------------------------------------------------------------------------------------------------------------


def test_published_numbers_stand_beside_ours_on_the_papers_sets(run: ReportInput, tmp_path: Path) -> None:
    made = build(replace(run, evaluations=[evaluation(tmp_path, "sft", published.BENCHMARKS, 20)]))
    assert made.markdown.count("(published") == len(published.ROWS)
    row = next(line for line in made.markdown.splitlines() if line.startswith("| parallel\\_r1\\_seen"))
    assert [cell.split(" ")[0] for cell in row.strip("| ").split(" | ")[1:]] == ["19.2", "19.4", "70.5", "86.7", "48.9", "27.3", "–", "–"]
    assert "published" not in build(run).markdown.split("## Config")[0], "the demo's sets are not the paper's"


@pytest.fixture(scope="module")
def papers(run: ReportInput, tmp_path_factory: pytest.TempPathFactory) -> ReportInput:
    """Checkpoints that `summarise` scored on sets called as the paper's, under a config at the paper's values."""
    folder, made = tmp_path_factory.mktemp("papers"), []
    for label, chance in (("base", 0.1), ("sft", 0.3), ("rl hard", 0.5)):
        sets, rows = {}, []
        for name in published.BENCHMARKS:
            samples = published.SAMPLES[name]
            random.seed(f"{label}/{name}")
            mine = [rollout(name, i, k, random.random() < chance, True) for i in range(published.PROBLEMS[name]) for k in range(samples)]
            sets[name] = {"problems": published.PROBLEMS[name], "samples": samples, "metrics": summarise(mine, samples, 100, 0)}
            clean = [row for row in mine if int(row["problem_id"].rsplit("-", 1)[1]) >= 10]
            sets[name]["clean"] = {"problems": len(clean) // samples, "samples": samples, "metrics": summarise(clean, samples, 100, 0)}
            rows += mine
        made.append(Evaluation(label, {"engine": "vllm", "sets": sets}, write(folder / f"{label}.jsonl", rows)))
    return replace(run, evaluations=made, config=schema.parse({"name": "parallel_r1_seen"}))


@pytest.fixture(scope="module")
def papers_markdown(papers: ReportInput) -> str:
    """Their report."""
    return build(papers).markdown


def table_row(markdown: str, heading: str, first: str) -> str:
    section = markdown.split(f"## {heading}")[1].split("\n## ")[0]
    return next(line for line in section.splitlines() if line.startswith(f"| {first}"))


def test_our_numbers_stand_beside_the_papers(run: ReportInput, papers_markdown: str) -> None:
    last = table_row(papers_markdown, "Beside the paper", "rl hard (parallel\\_r1\\_seen)")
    for theirs in ("19.2", "38.9", "19.4", "37.1", "70.5", "85.0", "86.7", "27.3"):
        assert f"(paper {theirs})" in last
    assert last.endswith("| yes |") and "(sft\\_seen)" in table_row(papers_markdown, "Beside the paper", "sft")
    assert tables.paper(run.evaluations, run.config) is None, "the demo's sets are not the paper's"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluate": {"rollout": {"max_response_tokens": 512}}}, "budget of 512 tokens, the paper's is 3000"),
        ({"evaluate": {"rollout": {"top_p": 0.9}}}, "temperature 1, top_p 0.9"),
        ({"student": {"type": "hub", "name": "some/model"}}, "another student than Qwen/Qwen3-4B-Base"),
        ({"name": "mine"}, "the paper has no such row"),
    ],
)
def test_what_can_not_be_compared_says_why(papers: ReportInput, changes: dict[str, Any], reason: str) -> None:
    table = tables.paper(papers.evaluations, schema.parse({"name": "parallel_r1_seen", **changes}))
    assert table and table.rows[-1].cells[-1].text == "no" and reason in table.rows[-1].cells[-1].note


@pytest.mark.parametrize(("problems", "samples", "reasons"), [
    (500, 1, ["MATH: 500 problems, the paper's has 316, a broken subset"]), (316, 1, []), (316, 4, ["MATH: 4 samples, the paper took 1"]),
])  # fmt: skip
def test_a_set_of_another_size_is_no_match(problems: int, samples: int, reasons: list[str]) -> None:
    assert published.other_set("MATH", problems, samples) == reasons


def test_another_subset_spoils_only_its_benchmark(papers: ReportInput) -> None:
    sets = {name: {**entry, "problems": 500} if name == "MATH" else entry for name, entry in papers.evaluations[-1].results["sets"].items()}
    table = tables.paper([replace(papers.evaluations[-1], results={"sets": sets})], papers.config)
    assert table and (table.rows[0].cells[-1].text, table.rows[0].cells[-1].note) == (
        "partly",
        "MATH: 500 problems, the paper's has 316, a broken subset",
    )


def test_full_and_clean_and_every_estimator(papers: ReportInput, papers_markdown: str) -> None:
    entry = papers.evaluations[0].results["sets"]["AMC23"]
    full, clean = (table_row(papers_markdown, "Ways of counting", f"base (AMC23{part}") for part in (": 40", ", clean: 30"))
    for row, metrics in ((full, entry["metrics"]), (clean, entry["clean"]["metrics"])):
        shown = [cell.split(" (")[0] for cell in row.strip("| ").split(" | ")[1:5]]
        assert shown == [f"{100 * metrics[metric]['value']:.1f}" for metric in ("mean", "pass@k", "maj@k", "best@k")]
        assert "sampling" in row
    assert f"clean {100 * entry['clean']['metrics']['mean']['value']:.1f} (30 problems)" in table_row(papers_markdown, "Results", "base")


def test_differences_carry_a_corrected_p(papers_markdown: str) -> None:
    assert "p < 0.001, Holm" in table_row(papers_markdown, "Differences between checkpoints", "base → rl hard").replace("&lt;", "<")
    assert "p Holm is corrected for all 12 comparisons" in papers_markdown


def test_published_mean_needs_all_four_sets(run: ReportInput, tmp_path: Path) -> None:
    markdown = build(replace(run, evaluations=[evaluation(tmp_path, "sft", ("AMC23", "mine"), 20)])).markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| parallel\\_r1\\_seen"))
    assert "70.5" in row and "48.9" not in row


@pytest.mark.parametrize("row", [row for row in published.ROWS if row.mean is not None], ids=lambda row: row.recipe)
def test_published_rows_agree_with_themselves(row: published.Published) -> None:
    assert len(row.scores) == 4 and sum(row.scores.values()) / 4 == pytest.approx(row.mean, abs=0.06)


@pytest.mark.parametrize(
    "names", [("tier1",), ("tier1", "tier2", "tier3"), published.BENCHMARKS, ("a" * 50, "b" * 50, "c\nd", "e|f", "g", "h")]
)
def test_terminal_table_fits(tmp_path: Path, names: tuple[str, ...]) -> None:
    labels = (*LEVELS, "a very long label of a checkpoint that somebody set")
    text = results_table([evaluation(tmp_path, label, names, 12) for label in labels])
    assert max(map(len, text.splitlines())) <= 120
    assert re.search(r"rl hard +\d+\.\d ±\d+\.\d", text)


def test_results_are_the_measured_numbers(run: ReportInput) -> None:
    made = build(run).results
    assert made["name"] == "demo" and len(made["rows"]) == 4 * 3 * 7
    measured = run.evaluations[3].results["sets"]["tier3"]["metrics"]["mean"]
    row = next(row for row in made["rows"] if (row["checkpoint"], row["set"], row["metric"]) == ("rl hard", "tier3", "mean"))
    assert {part: row[part] for part in measured} == measured and (row["problems"], row["samples"]) == (60, 4)


def test_markdown_tables_are_rectangular(run: ReportInput) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", build(run).markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_config_is_whole_and_keeps_credentials_to_itself(run: ReportInput) -> None:
    config = run.config.model_copy(update={"store": "s3://key:secret@bucket/prefix"})
    markdown = build(replace(run, config=config)).markdown
    assert "secret" not in markdown and "s3://***@bucket/prefix" in markdown
    assert schema.parse(yaml.safe_load(markdown.split("```yaml\n")[1].split("```")[0])) == config.model_copy(
        update={"store": "s3://***@bucket/prefix"}
    )


# --- rollouts -------------------------------------------------------------------------------------------------------------


def kinds(parts: list[Main | Block]) -> list[Any]:
    """Parts in short: m for main text, (paths, has a summary) for a block."""
    return [(len(part.paths), part.summary is not None) if isinstance(part, Block) else "m" for part in parts]


P0, P1, S0 = ({"kind": kind, "block": 0, "path": path, "text": "x"} for kind, path in (("path", 0), ("path", 1), ("summary", None)))
Q0, Q1, S1 = (part | {"block": 1} for part in (P0, P1, S0))
M = {"kind": "main", "block": None, "path": None, "text": "x"}


@pytest.mark.parametrize("segments, expected, reason", [
    ([M, P0, P1, S0, M], ["m", (2, True), "m"], "the usual one"),
    ([P0, P1, S0, Q0, Q1, S1], [(2, True), (2, True)], "two blocks that touch"),
    ([P0, P1], [(2, False)], "cut off before its summary"),
    ([M, S0], ["m", (0, True)], "a summary without paths is shown where it stands"),
    ([P0, P1, S0, M | {"text": "\n"}, Q0], [(2, True), (1, False)], "blank main text is no part"),
    ([p | {"block": None} for p in (P0, P1, S0, P0, P1)], [(2, True), (2, False)], "unnumbered blocks end with their summary"),
    ([], ["m"], "no segments: the text as it is"),
])  # fmt: skip
def test_blocks_are_laid_out(segments: list[dict[str, Any]], expected: list[Any], reason: str) -> None:
    assert kinds(lay_out({"segments": segments, "text": "whole"}).parts) == expected, reason


def test_samples_show_right_and_wrong_of_every_checkpoint(run: ReportInput) -> None:
    html = build(replace(run, analysis=None)).html
    assert html.count('class="rollout"') == len(run.evaluations) * run.config.report.sample_rollouts
    assert html.count("✓ right") == html.count("✗ wrong")


def test_the_analysis_is_said_in_words(run: ReportInput) -> None:
    made = build(run)
    for text in (made.html, made.markdown):
        assert "the first block moved from 5.7 to 2.2 % of the response" in text
        assert "The paths of rl hard agree in" in text


def test_early_rollouts_stand_beside_late_ones(run: ReportInput) -> None:
    html = build(run).html
    assert html.count('class="pair"') == 2 * run.config.analysis.samples, "two rl stages"
    for stage, last in (("rl easy", 10), ("rl hard", 40)):
        assert f"Rollouts of {stage}: step 1 beside step {last}" in html


@pytest.mark.parametrize("text, expected, reason", [
    ("a\x00b", "a␀b", "NUL can't stand in HTML"),
    ("\ud800", "?", "a lone surrogate can't be encoded"),
    ("a\r\nb\tc", "a\nb\tc", "line ends and tabs stay"),
    (None, "", "nothing"),
])  # fmt: skip
def test_shown(text: str | None, expected: str, reason: str) -> None:
    assert shown(text) == expected, reason


# --- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found, expected", [
    (written(-0.04), "0.0"), (written(-3.25), "−3.2"), (written(math.nan), "–"), (written(1234567, 0), "1,234,567"),
    (signed(0.04), "0.0"), (signed(3.0), "+3.0"), (signed(-3.0), "−3.0"), (signed(100.0), "+100.0"), (signed(math.nan), "–"),
    (duration(4.21), "4.2 s"), (duration(59.99), "60.0 s"), (duration(200), "3 min 20 s"), (duration(7500), "2 h 05 min"),
])  # fmt: skip
def test_numbers_are_written_for_people(found: str, expected: str) -> None:
    assert found == expected


def test_mean_of_sets_is_more_certain_than_each() -> None:
    mean = mean_of([Estimate(0.4, 0.3, 0.5), Estimate(0.6, 0.5, 0.7), Estimate()])
    assert mean.value == pytest.approx(0.5) and mean.half == pytest.approx(0.1 / math.sqrt(2))
    assert not mean_of([]).known and not mean_of([Estimate(0.5)]).bounded


@pytest.mark.parametrize(("low", "high", "p_holm", "expected"), [
    (0.01, 0.2, 0.01, "higher"),
    (-0.2, -0.01, math.nan, "lower"),
    (-0.057, -0.003, 0.464, "not shown"),
    (-0.01, 0.2, 0.01, "not shown"),
])  # fmt: skip
def test_a_difference_is_claimed_where_interval_and_corrected_test_agree(low: float, high: float, p_holm: float, expected: str) -> None:
    change = Change("base", "sft", "tier2", Estimate((low + high) / 2, low, high), 150, paired=True, p_holm=p_holm)
    assert change.verdict == expected
