"""The markup: every case of the shared data, a table of faults by code, and hostile input."""

import json
import time
from pathlib import Path

import pytest

from parallel_r1.markup import BLOCK_CLOSER, TAGS, TagIds, canonicalise, validate, validate_ids

DATA = Path(__file__).parents[1].parent / "shared" / "data"
BLOCK = "<Parallel><Path>a</Path><Path>b</Path></Parallel>\n<Summary>s</Summary>"
END = "\nFinal Answer: 5"


def rows(name: str) -> list[dict]:
    path = DATA / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def codes(text: str, num_paths: int | None = None) -> list[str]:
    return [fault.code for fault in validate(text, num_paths)]


# A stand-in for a tokenizer: ids 1..6 are the tags, 0 is EOS, 7 is a blank, every other character is its own id.
TAG_IDS = TagIds(1, 2, 3, 4, 5, 6, eos=frozenset({0}), blank=frozenset({7}))


def ids_of(text: str, quoted: tuple[str, ...] = ()) -> list[int]:
    """Ids of a text; in the `quoted` pieces tags are plain characters."""
    ids: list[int] = []
    at = 0
    while at < len(text):
        quote = next((piece for piece in quoted if text.startswith(piece, at)), None)
        tag = next((tag for tag in TAGS if text.startswith(tag, at)), None)
        if quote:
            ids += [1000 + ord(character) for character in quote]
        else:
            ids.append(TAGS.index(tag) + 1 if tag else 7 if text[at].isspace() else 1000 + ord(text[at]))
        at += len(quote or tag or "x")
    return ids


QUOTED = ("The </Parallel> block", "if a<Path>b is", "with <Parallel>.", "{<Path>}", "write <Summary> here", "`<Parallel>`")


@pytest.mark.parametrize("case", [c for c in rows("format_cases.jsonl") if c["level"] == "text"], ids=lambda case: case["why"])
def test_shared_text_cases(case: dict) -> None:
    assert (not validate(case["text"])) == case["right_verdict"]


@pytest.mark.parametrize("case", [c for c in rows("format_cases.jsonl") if c["level"] == "token"], ids=lambda case: case["why"])
def test_shared_token_cases(case: dict) -> None:
    assert any(piece in case["text"] for piece in QUOTED)
    assert (not validate_ids(ids_of(case["text"], QUOTED), TAG_IDS)) == case["right_verdict"]


def test_real_teacher_trajectories_are_accepted() -> None:
    """All 200 were read by the checker and none is rejected: the published set holds only clean blocks (257 blocks, 523 paths)."""
    trajectories = rows("teacher_trajectories_200.jsonl")
    if not trajectories:
        pytest.skip("no shared data")
    rejected = {row["id"]: codes(row["text"]) for row in trajectories if validate(row["text"])}
    assert rejected == {}
    for row in trajectories:
        canonical = canonicalise(row["text"])
        assert validate(canonical) == [] and canonicalise(canonical) == canonical
        assert "".join(canonical.split()) == "".join(row["text"].split()), "only white space changes"


@pytest.mark.parametrize(
    "text, expected, reason",
    [
        (f"{BLOCK}{END}", [], "the canonical block"),
        (f"So.{END}", [], "no block is valid too"),
        (f"<Parallel> <Path>a</Path>\n<Path>b</Path>\n</Parallel>\n\n<Summary>s</Summary>{END}", [], "white space between tags"),
        (f"if x < path and y > 3, or 2<3 <b>bold</b> {BLOCK}{END}", [], "comparisons and other markup are text"),
        (f"a parallelogram <Parallelogram> <pathway>{END}", [], "longer words that begin like a tag"),
        (BLOCK.replace("</Path>", "", 1) + END, ["unclosed_path"], "teacher dropped </Path>: the next <Path> shows it"),
        (BLOCK.replace("b</Path>", "b") + END, ["unclosed_path"], "teacher dropped the last </Path>"),
        (BLOCK.replace("</Parallel>", "") + END, ["unclosed_parallel"], "teacher dropped </Parallel>"),
        (BLOCK.replace("<Summary>", "") + END, ["missing_summary"], "teacher dropped <Summary>: not 'text before the summary'"),
        (BLOCK.replace("</Summary>", "") + END, ["unclosed_summary", "misplaced_answer", "missing_answer"], "swallows the answer"),
        (BLOCK.replace("<Path>b</Path>", "") + END, ["too_few_paths"], "a single path"),
        (BLOCK.replace("\n<Summary>s</Summary>", "") + " Work." + END, ["missing_summary", "misplaced_answer", "missing_answer"], "none"),
        (BLOCK.replace("\n<Summary>s</Summary>", "") + BLOCK + END, ["missing_summary"], "next block instead of the summary"),
        (
            f"<Parallel>\n<Path>a</Path><Path>b</Path></Parallel> So.\n<Summary>s</Summary>{END}",
            ["text_before_summary"],
            "prose in the gap",
        ),
        (BLOCK.replace("<Path>b", "Second, <Path>b") + END, ["text_between_paths"], "prose between paths"),
        (BLOCK.replace(">a<", "> \n<") + END, ["empty_path"], "blank path"),
        (BLOCK.replace(">s<", "><") + END, ["empty_summary"], "empty summary"),
        (BLOCK.replace("<Path>b", "<path>b") + END, ["near_miss_tag"], "lower case: one fault, read as what it resembles"),
        (BLOCK.replace("<Path>b", "<Path 2>b") + END, ["near_miss_tag"], "attribute"),
        (BLOCK.replace("<Path>b", "＜Path＞b") + END, ["near_miss_tag"], "full-width brackets"),
        (BLOCK.replace("</Path></Par", "<\\Path></Par") + END, ["near_miss_tag"], "backslash for the slash"),
        (f"{BLOCK}{END} <Path", ["near_miss_tag", "stray_tag"], "cut inside a tag"),
        (f"a<|im_end|>{END}", ["eos"], "end-of-sequence text in the main thread"),
        (BLOCK.replace(">s<", ">s</s><") + END, ["eos"], "</s> in a summary"),
        (f"Final Answer: 5\n{BLOCK}", ["misplaced_answer", "missing_answer"], "answer before the block"),
        (f"{BLOCK}{END}{END}", ["several_answers"], "two answers"),
        (BLOCK.replace(">a<", ">Final Answer: 5<") + END, ["misplaced_answer"], "a path answers too"),
        (BLOCK, ["missing_answer"], "no answer at all"),
        ("<Parallel><Path>a", ["unclosed_path", "missing_answer"], "cut in a path"),
        ("<Parallel><Path>a</Path>", ["unclosed_parallel", "missing_answer"], "cut between paths"),
        ("", ["missing_answer"], "empty text"),
    ],
)
def test_faults_by_code(text: str, expected: list[str], reason: str) -> None:
    assert codes(text) == expected, reason


@pytest.mark.parametrize(
    "paths, num_paths, expected",
    [(2, 2, []), (3, None, []), (3, 2, ["wrong_path_count"]), (1, 2, ["wrong_path_count"]), (1, None, ["too_few_paths"]), (3, 3, [])],
)
def test_path_count(paths: int, num_paths: int | None, expected: list[str]) -> None:
    text = f"<Parallel>{'<Path>a</Path>' * paths}</Parallel>\n<Summary>s</Summary>{END}"
    assert codes(text, num_paths) == expected
    assert [fault.code for fault in validate_ids(ids_of(text), TAG_IDS, num_paths)] == expected


def test_a_fault_says_where() -> None:
    text = f"So {BLOCK}".replace(">b<", "> <")
    fault = validate(text + END)[0]
    assert (fault.code, text[fault.position :].startswith("<Path> </Path>")) == ("empty_path", True)


@pytest.mark.parametrize(
    "ids, expected, reason",
    [
        ([1, 3, 50, 4, 3, 51, 4, 2, 7, 5, 52, 6, 53, 0], [], "one block, blank before <Summary>, EOS last"),
        ([50, 0], [], "no block"),
        ([50], [], "cut at the budget outside a block: the finish reason says so, the markup is fine"),
        ([1, 3, 7, 4, 3, 51, 4, 2, 5, 52, 6, 0], [("empty_path", 1)], "a path of blanks"),
        ([1, 3, 50, 0, 4, 3, 51, 4, 2, 5, 52, 6, 0], [("eos", 3)], "EOS inside a path"),
        ([1, 3, 50, 4, 3, 51, 0], [("unclosed_path", 4)], "ended in a path"),
        ([50, 4, 0], [("stray_tag", 1)], "stray closer"),
        ([1, 3, 50, 4, 3, 51, 4, 2, 52, 5, 53, 6], [("text_before_summary", 8)], "text before the summary"),
    ],
)
def test_token_level(ids: list[int], expected: list[tuple[str, int]], reason: str) -> None:
    assert [(fault.code, fault.position) for fault in validate_ids(ids, TAG_IDS)] == expected, reason


class ByteTokenizer:
    """Characters are tokens, the tags and an EOS are added: just what `TagIds.from_tokenizer` needs to see."""

    eos_token_id = 6

    def __init__(self, tags: tuple[str, ...] = TAGS) -> None:
        self.tokens = [*tags, "<|endoftext|>", " ", "\n\n", "x", " y", "\u3000"]

    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        return ["".join(self.tokens[i] for i in ids) for ids in sequences]


def test_tag_ids_of_a_tokenizer() -> None:
    tags = TagIds.from_tokenizer(ByteTokenizer())
    assert (tags.parallel, tags.summary_end, tags.eos, tags.blank) == (0, 5, frozenset({6}), frozenset({7, 8, 11}))
    with pytest.raises(ValueError, match="no single token for </Summary>"):
        TagIds.from_tokenizer(ByteTokenizer(TAGS[:5]))


def test_canonical_spelling_leaves_bodies_alone() -> None:
    loose = "Lead.\n\n<Parallel>\n<Path>\n a </Path> \n<Path>b</Path>\n</Parallel>  \n\n<Summary> s </Summary>  \nFinal Answer: 5"
    tight = "Lead.\n\n<Parallel><Path>\n a </Path><Path>b</Path></Parallel>\n<Summary> s </Summary>  \nFinal Answer: 5"
    assert canonicalise(loose) == tight == canonicalise(tight)
    assert BLOCK_CLOSER in canonicalise(BLOCK.replace("\n", ""))


@pytest.mark.parametrize("piece", ["<", "< ", "<Path", "<Path>", "</Path ", "<Parallel>", "＜/", "Final Answer:", "<|im_end|>"])
def test_hostile_input_takes_linear_time(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    started = time.process_time()
    validate(text)
    canonicalise(text)
    assert time.process_time() - started < 5
