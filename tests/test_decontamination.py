"""Decontamination: the shared real rows give nothing away, and deliberately planted near-copies of AMC23 items are found, all of them."""

import json
from pathlib import Path

import pytest

from parallel_r1.config import DecontaminateConfig
from parallel_r1.decontamination import find_copies
from parallel_r1.problems import Problem

DATA = Path(__file__).parents[1].parent / "shared" / "data"
CONFIG = DecontaminateConfig()
ITEM = (
    "Cities A and B are 45 miles apart. Alicia lives in A and Beth lives in B. Alicia bikes towards B at 18 miles per hour. "
    "Leaving at the same time, Beth bikes toward A at 12 miles per hour."
)
SHORT = "What is $2+3$?"


def shared(name: str) -> list[Problem]:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no shared data")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Problem(row["id"], row["problem"], row["answer"], row["source"]) for row in rows]


@pytest.mark.parametrize(
    ("text", "share", "exact", "reason"),
    [
        (ITEM, 1.0, True, "the item itself"),
        (ITEM.upper().replace(" ", "  "), 1.0, True, "case and spaces"),
        (f"Problem 7. {ITEM} Give the number alone.", 1.0, False, "with words around it"),
        (ITEM.replace("45", "50"), 0.8, False, "another number near the beginning"),
        (ITEM.split(" Leaving")[0], 0.6, False, "its first half and a bit"),
        (ITEM.split(" Alicia bikes")[0], None, False, "less than half of its pieces"),
        (ITEM.replace("Alicia", "Bob").replace("Beth", "Tim").replace("miles", "km"), None, False, "every few words another one"),
    ],
)
def test_near_copies(text: str, share: float | None, exact: bool, reason: str) -> None:
    copies = find_copies([("t", text)], {"AMC23": [Problem("a", ITEM, "27", "s")]}, CONFIG)
    assert (len(copies) == 0) is (share is None), (reason, copies)
    if share is not None:
        assert (copies[0].test_id, copies[0].set, copies[0].exact) == ("a", "AMC23", exact), reason
        assert copies[0].share == pytest.approx(share, abs=0.12), reason


@pytest.mark.parametrize(("text", "found", "reason"), [
    ("what is 2 + 3 ?", True, "the same but for spaces and delimiters"),
    ("What is $2-3$?", False, "the sign is part of a short item"),
    ("What is $2+3$? Explain.", False, "shorter than a piece: compared as a whole only"),
])  # fmt: skip
def test_short_items_are_compared_as_a_whole(text: str, found: bool, reason: str) -> None:
    assert bool(find_copies([("t", text)], {"s": [Problem("a", SHORT, "5", "s")]}, CONFIG)) is found, reason


SETS = ("amc23", "aime24", "aime25", "math500", "gsm8k_test_200")


def test_the_shared_training_rows_give_nothing_away() -> None:
    """As measured: none of the 800 test items in the 500 DAPO rows (largest share 0.14) or the 200 teacher trajectories."""
    training = [(p.id, p.problem) for name in ("dapo_train_500", "teacher_trajectories_200") for p in shared(name)]
    tests = {name: shared(name) for name in SETS}
    assert find_copies(training, tests, CONFIG) == []
    loose = find_copies(training, tests, CONFIG.model_copy(update={"threshold": 0.1}))
    assert sorted({(copy.set, copy.test_id) for copy in loose}) == [("aime24", "aime24-023"), ("aime25", "aime25-007")]


def test_planted_near_copies_are_found_and_nothing_else() -> None:
    amc = [item for item in shared("amc23") if len(item.problem.split()) > 25]
    planted = {
        "exact": amc[0].problem,
        "spaced": amc[1].problem.replace(" ", "  ").upper(),
        "wrapped": f"Solve this. {amc[2].problem} State your answer as an integer.",
        "tail cut": " ".join(amc[3].problem.split()[: round(0.85 * len(amc[3].problem.split()))]),
        "first word changed": " ".join(["Consider", *amc[4].problem.split()[1:]]),
        "no delimiters": amc[5].problem.replace("$", ""),
    }
    training = [(p.id, p.problem) for p in shared("dapo_train_500")] + list(planted.items())
    copies = find_copies(training, {name: shared(name) for name in SETS}, CONFIG)
    assert [(copy.train_id, copy.set, copy.test_id) for copy in copies] == [
        (name, "amc23", item.id) for name, item in zip(planted, amc, strict=False)
    ]


def test_the_papers_math_subset_lies_in_math500() -> None:
    """294 of its 316 items, as measured; the others were cut at a blank line before the half."""
    subset = [(p.id, p.problem) for p in shared("math300_ref")]
    copies = find_copies(subset, {"MATH": shared("math500")}, CONFIG)
    assert len({copy.train_id for copy in copies}) == 294
