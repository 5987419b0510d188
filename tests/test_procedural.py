"""The procedural tiers: what they demand, that train and heldout never meet, and that ids and texts are stable."""

import itertools

import pytest

from parallel_r1.procedural import Numbers, is_held_out, make_problems, parse


def crossings(numbers: Numbers) -> int:
    counts = list(itertools.accumulate(numbers.events, initial=numbers.start))
    return sum(a // 10 != b // 10 for a, b in itertools.pairwise(counts))


@pytest.mark.parametrize(
    "tier, lengths, max_start, max_change, min_crossings", [(1, {1, 2, 3}, 15, 5, 0), (2, {2}, 40, 9, 1), (3, {3}, 40, 9, 2)]
)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_tiers_demand_what_they_say(tier: int, lengths: set[int], max_start: int, max_change: int, min_crossings: int, split: str) -> None:
    problems = make_problems(tier, split, 300, seed=3)
    numbers = [parse(problem.problem) for problem in problems]
    assert {len(n.events) for n in numbers} == lengths
    for problem, made in zip(problems, numbers, strict=True):
        assert 3 <= made.start <= max_start and all(2 <= abs(event) <= max_change for event in made.events)
        assert crossings(made) >= min_crossings
        assert min(itertools.accumulate(made.events, initial=made.start)) >= 0
        assert problem.answer == str(made.start + sum(made.events)) == str(made.answer)
        assert is_held_out(made) == (split == "heldout")


def test_train_and_heldout_never_share_numbers() -> None:
    train = {parse(p.problem) for tier in (1, 2, 3) for seed in (0, 1) for p in make_problems(tier, "train", 1500, seed)}
    heldout = {parse(p.problem) for tier in (1, 2, 3) for seed in (0, 5) for p in make_problems(tier, "heldout", 150, seed)}
    assert not train & heldout


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_sets_are_large_distinct_and_stable(tier: int) -> None:
    train = make_problems(tier, "train", 6000, seed=0)
    assert len({p.problem for p in train}) == len({p.id for p in train}) == 6000
    heldout = make_problems(tier, "heldout", 150, seed=0)
    assert len({parse(p.problem) for p in heldout}) == 150
    assert heldout == make_problems(tier, "heldout", 150, seed=0)
    assert heldout != make_problems(tier, "heldout", 150, seed=1)
    assert heldout[:20] == make_problems(tier, "heldout", 20, seed=0), "a smaller set is the beginning of a larger one"
    assert heldout[7].id == f"tier{tier}-heldout-0007"


def test_the_bound_is_said_and_can_be_reached() -> None:
    with pytest.raises(ValueError, match=r"tier 1, split heldout: count = 100000, but only \d+ different problems exist") as caught:
        make_problems(1, "heldout", 100_000, seed=0)
    bound = int(str(caught.value).split("only ")[1].split()[0])
    assert bound == 1614, "the number measured in demo_recipe.md"
    assert len({parse(p.problem) for p in make_problems(1, "heldout", bound, seed=0)}) == bound


@pytest.mark.parametrize(
    "text, expected, reason",
    [
        ("Tom has 12 apples. He buys 5. Then he loses 3. How many apples now?", (12, (5, -3)), "gain, loss"),
        ("Zoe has 3 beads. She gives away 2. How many beads now?", (3, (-2,)), "a verb of two words"),
    ],
)
def test_parse(text: str, expected: tuple[int, tuple[int, ...]], reason: str) -> None:
    assert parse(text) == expected, reason


@pytest.mark.parametrize(
    "text", ["", "What is 2+2?", "Tom has 2 apples. How many apples now?", "Tom has 2 apples. He eats 1. How many apples now?"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a procedural problem"):
        parse(text)
