"""The spawn-join state machine, told plain lists: no model, no engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_r1.config import RolloutConfig
from parallel_r1.markup import TagIds, validate_ids
from parallel_r1.rollout.machine import Completion, Request, Rollout
from parallel_r1.trajectory import Trajectory

TAGS = TagIds(parallel=1, parallel_end=2, path=3, path_end=4, summary=5, summary_end=6, eos=frozenset({7}), blank=frozenset({8}))
P, EP, PA, EPA, S, ES, EOS, NL = 1, 2, 3, 4, 5, 6, 7, 8
WORD = 20
CONFIG = RolloutConfig(num_paths=2, max_blocks=2, max_response_tokens=100, max_path_tokens=8, max_summary_tokens=6)


def play(answers: list[list[int]], config: RolloutConfig = CONFIG) -> tuple[Rollout, list[Request]]:
    """Answer the requests in the order in which they are made; gives the rollout and all requests."""
    rollout = Rollout([WORD], config, TAGS, [NL])
    pending, asked = rollout.begin(), []
    for tokens in answers:
        request = pending.pop(0)
        asked.append(request)
        pending += rollout.receive(request.slot, Completion(tokens, [-0.5] * len(tokens)))
    asked += pending
    return rollout, asked


BLOCK = [PA, 30, EPA, PA, 31, EPA, EP, NL, S, 32, ES]


@pytest.mark.parametrize(
    ("answers", "ids", "mask", "finish", "reason"),
    [
        ([[25, EOS]], [25, EOS], [1, 1], "eos", "no block: what was sampled is the response"),
        (
            [[25, P], [30, EPA], [31, EPA], [32, ES], [26, EOS]],
            [25, P, *BLOCK, 26, EOS],
            [1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1],
            "eos",
            "sampled closers are trained, opening tags and the join are forced",
        ),
        (
            [[P], [30, EOS], [31], [32, EOS], [EOS]],
            [P, *BLOCK, EOS],
            [1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1],
            "eos",
            "EOS or a budget's end inside a body: the closer is forced, EOS is dropped",
        ),
        ([[25, ES]], [25, EOS], [1, 0], "stray_tag", "a closing tag in the main thread ends the response and is not left in it"),
        ([[S]], [EOS], [0], "stray_tag", "even where nothing came before: no response is empty"),
    ],
)
def test_responses(answers: list[list[int]], ids: list[int], mask: list[int], finish: str, reason: str) -> None:
    rollout, _ = play(answers)
    assert rollout.done, reason
    assert (rollout.trajectory.completion_ids, rollout.trajectory.loss_mask, rollout.trajectory.finish) == (ids, mask, finish), reason


def test_paths_are_sampled_blind_to_each_other_and_the_summary_reads_both() -> None:
    _, asked = play([[25, P], [30, EPA], [31, EPA], [32, ES]])
    first, path_1, path_2, summary, main = asked
    assert first.token_ids == [WORD]
    assert path_1.token_ids == path_2.token_ids == [WORD, 25, P, PA], "both paths go on from the same prefix"
    assert summary.token_ids == [WORD, 25, P, *BLOCK[:9]]
    assert main.token_ids == [WORD, 25, P, *BLOCK]


def test_paths_may_finish_in_any_order() -> None:
    rollout = Rollout([WORD], CONFIG, TAGS, [NL])
    rollout.begin()
    first, second = rollout.receive(0, Completion([P], [-1.0]))
    assert rollout.receive(second.slot, Completion([31, EPA], [-1.0, -1.0])) == []
    (summary,) = rollout.receive(first.slot, Completion([30, EPA], [-1.0, -1.0]))
    assert summary.token_ids == [WORD, P, *BLOCK[:9]], "paths stand in the order of their numbers, not of their ends"


def test_after_the_last_block_the_main_thread_goes_on_without_parallel() -> None:
    block = [[P], [30, EPA], [31, EPA], [32, ES]]
    rollout, asked = play([*block, *block, [26, EOS]], CONFIG.model_copy(update={"max_response_tokens": 200}))
    assert asked[8].banned == (P,), "the released loop stops dead here, so such rollouts can never answer"
    assert rollout.trajectory.finish == "eos" and rollout.trajectory.blocks == 2


def test_a_block_opens_only_where_all_of_it_fits() -> None:
    _, asked = play([[25] * 68, [25, EOS]])
    assert asked[0].max_tokens == 100 - (2 * (8 + 2) + 3 + 6 + 2) - 1, "up to here a block still fits"
    assert asked[1].banned == (P,), "from here on it does not"


def test_no_blocks_when_none_are_allowed() -> None:
    _, asked = play([[25, EOS]], CONFIG.model_copy(update={"max_blocks": 0}))
    assert asked[0].banned == (P,) and asked[0].max_tokens == 100


@pytest.mark.parametrize(
    ("stray", "reason"),
    [(P, "a block in a path"), (PA, "a path in a path"), (EP, "the block's end in a path"), (ES, "a summary's end in a path")],
)
def test_stray_tags_inside_a_path_are_dropped_and_counted(stray: int, reason: str) -> None:
    rollout, _ = play([[P], [30, stray], [31, EPA], [32, ES], [EOS]])
    assert validate_ids(rollout.trajectory.completion_ids, TAGS, 2) == [], reason
    assert rollout.stray_tags == 1, reason


def test_seeds_differ_between_paths_and_repeat_between_runs() -> None:
    once, again = (play([[P]])[1] for _ in range(2))
    assert [request.seed for request in once] == [request.seed for request in again]
    assert len({request.seed for request in once}) == 3


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_paths=st.integers(2, 4),
    max_blocks=st.integers(0, 3),
    response=st.integers(16, 200),
    path=st.one_of(st.none(), st.integers(2, 20)),
    summary=st.integers(2, 40),
)
def test_any_engine_gives_a_well_formed_response_within_its_budget(
    seed: int, num_paths: int, max_blocks: int, response: int, path: int | None, summary: int
) -> None:
    """Engines that stop anywhere, sample any tag, ignore bans, or answer nothing."""
    config = RolloutConfig(
        num_paths=num_paths, max_blocks=max_blocks, max_response_tokens=response, max_path_tokens=path, max_summary_tokens=summary
    )
    rng = random.Random(seed)
    rollout = Rollout([WORD, WORD], config, TAGS, [NL])
    pending, turns = rollout.begin(), 0
    while pending:
        request = pending.pop(rng.randrange(len(pending)))
        turns += 1
        assert request.max_tokens >= 1
        tokens = answer(rng, request)
        pending += rollout.receive(request.slot, Completion(tokens, [-1.0] * len(tokens)))
    check(rollout, config, turns)


def answer(rng: random.Random, request: Request) -> list[int]:
    """What an engine might say: some words, perhaps a stop token, never more than was asked for."""
    length = rng.choice([0, 1, request.max_tokens - 1, request.max_tokens, rng.randint(0, request.max_tokens)])
    words = [rng.choice([WORD, 25, NL]) for _ in range(length)]
    stop = rng.choice([None, *request.stop, P, EPA, ES, EOS])
    return [*words[: request.max_tokens - 1], stop] if stop is not None else words


def check(rollout: Rollout, config: RolloutConfig, turns: int) -> None:
    """The response is whole: within budget, covered by its spans, valid but for bodies that the engine left blank."""
    trajectory = rollout.trajectory
    length = len(trajectory.completion_ids)
    assert rollout.done
    assert length <= config.max_response_tokens
    assert len(trajectory.logprobs) == len(trajectory.loss_mask) == length
    assert [span.start for span in trajectory.spans] == [0, *(span.end for span in trajectory.spans)][:-1]
    assert not trajectory.spans or trajectory.spans[-1].end == length
    assert trajectory.blocks <= config.max_blocks
    assert turns <= (config.num_paths + 3) * (config.max_blocks + 1)
    faults = {fault.code for fault in validate_ids(trajectory.completion_ids, TAGS, config.num_paths)}
    assert faults <= {"empty_path", "empty_summary"}
    assert all(logprob == 0 for logprob, sampled in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not sampled)
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory


def test_critical_path_counts_only_the_longest_path_of_each_block() -> None:
    rollout, _ = play([[25, P], [30, 30, 30, EPA], [31, EPA], [32, ES], [26, EOS]])
    trajectory = rollout.trajectory
    assert len(trajectory.completion_ids) - trajectory.critical_path_tokens == 3, "the shorter path of 3 tokens runs beside the other"
    assert trajectory.relative_position == pytest.approx(1 / len(trajectory.completion_ids)), "<Parallel> is the second token"
