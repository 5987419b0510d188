"""Problems of reasoning_gym, where it is installed; and what is said where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from parallel_r1.config import ReasoningGymSource
from parallel_r1.problems import read_source
from parallel_r1.tables import SourceError

PROJECT = Path(__file__).parents[1]


def test_a_missing_package_is_named_with_the_way_out() -> None:
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from parallel_r1.config import ReasoningGymSource as S; from parallel_r1.problems import read_source\n"
        "try: read_source(S(dataset='gcd', count=2), 0)\n"
        "except ValueError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert said.startswith("reasoning_gym source gcd: ") and "`make reasoning-gym` installs" in said


@pytest.fixture
def gym() -> None:
    pytest.importorskip("reasoning_gym", reason="`make reasoning-gym` installs it")


@pytest.mark.usefixtures("gym")
def test_problems_repeat_and_splits_are_disjoint() -> None:
    source = ReasoningGymSource(dataset="leg_counting", level=1, count=40)
    problems = read_source(source, 0).problems
    assert problems == read_source(source, 0).problems != read_source(source, 1).problems
    assert len(problems) == 40 and all(int(p.answer) >= 0 for p in problems) and problems[3].id == "leg_counting-train-0003"
    held_out = read_source(source.model_copy(update={"split": "heldout"}), 0).problems
    assert not {p.problem for p in problems} & {p.problem for p in held_out}


@pytest.mark.usefixtures("gym")
def test_levels_and_parameters_change_the_problems() -> None:
    longest = []
    for options in ({"level": 0}, {"level": 4}, {"parameters": {"min_digits": 8, "max_digits": 8}}):
        problems = read_source(ReasoningGymSource(dataset="chain_sum", count=30, **options), 0).problems
        longest.append(max(len(p.problem) for p in problems))
    assert longest[0] < longest[1] < longest[2]


@pytest.mark.usefixtures("gym")
def test_short_answers() -> None:
    kept = read_source(ReasoningGymSource(dataset="fraction_simplification", answers="short", count=5), 0)
    assert any("/" in p.answer for p in kept.problems)


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(("options", "message"), [
    ({"dataset": "nope"}, "no data set 'nope'; there are: .*chain_sum"),
    ({"dataset": "chain_sum", "level": 99}, "chain_sum: level 99, .*its highest level is"),
    ({"dataset": "gcd", "parameters": {"foo": 1}}, "foo"),
    ({"dataset": "caesar_cipher"}, "count = 5, but 250 tries gave only 0 with integer answers"),
])  # fmt: skip
def test_errors_name_the_data_set_and_what_it_has(options: dict, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read_source(ReasoningGymSource(count=5, **options), 0)
