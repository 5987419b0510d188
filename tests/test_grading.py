"""Grading: the shared pairs, the policies, every gold of MATH-500 against itself, and safety against hostile input and odd callers."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parallel_r1 import symbolic
from parallel_r1.grading import extract, grade, grade_many
from parallel_r1.sampling import same_value

DATA = Path(__file__).parents[1].parent / "shared" / "data"
PROJECT = Path(__file__).parents[1]


def rows(name: str) -> list[dict]:
    path = DATA / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


@pytest.mark.parametrize("pair", rows("grading_pairs.jsonl"), ids=lambda pair: f"{pair['id']}-{pair['why'][:40]}")
def test_shared_pairs(pair: dict) -> None:
    """All 124 pairs are right; there are no exceptions to list."""
    started = time.monotonic()
    verdict = grade(pair["prediction_text"], pair["gold"])
    assert verdict.correct == pair["expected_correct"], verdict
    assert time.monotonic() - started < 30


SPELLINGS = ["Final Answer: {}", "Final Answer: ${}$", "so \\boxed{{{}}}", "**Final Answer**\n\n\\[\n\\boxed{{{}}}\n\\]"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_math500_golds_equal_themselves(spelling: str) -> None:
    golds = [row["answer"] for row in rows("math500.jsonl")]
    wrong = [gold for gold, verdict in zip(golds, grade_many([(spelling.format(g), g) for g in golds]), strict=True) if not verdict.correct]
    assert wrong == []


def test_real_teacher_trajectories() -> None:
    """All 200 published trajectories end in the right answer."""
    trajectories = rows("teacher_trajectories_200.jsonl")
    wrong = [row["id"] for row in trajectories if not grade(row["text"], row["answer"]).correct]
    assert wrong == []


@pytest.mark.parametrize(
    "response, expected, reason",
    [
        ("Final Answer: 42", "42", "plain"),
        ("final answer: 42\nmore", "42", "any case, to the end of the line"),
        ("**Final Answer**\n\n\\[\n\\boxed{42}\n\\]", "42", "heading, display, box"),
        ("Final Answer:\n$$\n42\n$$\nDone.", "42", "display on lines of its own"),
        (
            "Final Answer: \\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}\nok",
            "\\begin{pmatrix} 1 \\\\\n 2 \\end{pmatrix}",
            "matrix on two lines",
        ),
        ("Final Answer: 1\nFinal Answer: 2", "2", "the last one"),
        ("FINAL ANSWER: 42<|im_end|>junk", "42", "ends at an end-of-sequence mark"),
        ("so \\boxed{7} or \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "the last box"),
        ("so \\boxed{42}. Final Answer:", "42", "cut after the mark, but the box stands"),
        ("\\boxed{7} then \\boxed{4", None, "a cut box is no answer, nor is what it was to replace"),
        ("Final Answer: \\boxed{42", None, "cut box"),
        ("We add.\nThe answer is 42.", "42.", "last line in words"),
        ("So the answer to the problem is: **42**", "**42", "with words between"),
        ("Answer: 42", "42", "another mark"),
        ("#### 42", "42", "GSM8K's mark"),
        ("We add.\n\n$\\frac12$\n", "$\\frac12$", "a number alone on the last line"),
        ("The answer is 41.\nNo, we must add.", None, "only the last line"),
        ("so the total is 42", None, "a last line that names no answer"),
        ("we get 40 + 2", None, "nor does a computation"),
        ("The answer is \\boxed{4", None, "a cut box, whatever the line says"),
        ("<Parallel><Path>a</Path></Parallel>\n<Summary>42</Summary>", None, "nothing after the summary"),
        ("no mark at all", None, "no mark"),
        ("", None, "nothing"),
        ("<Parallel><Path>Final Answer: 42</Path>", None, "open block"),
        ("<Parallel><Path>a</Path></Parallel>\nFinal Answer: 42", None, "block without a summary isn't closed"),
        ("Final Answer: 42 <Parallel>", None, "a block opens after it"),
        ("</Path>Final Answer: 42", "42", "a stray closer hides nothing"),
        ("Final Answer: None", None, "no answer, in words"),
    ],
)
def test_extraction(response: str, expected: str | None, reason: str) -> None:
    answer = extract(response)
    assert (answer if answer is None else answer.strip("\n")) == expected, reason


@pytest.mark.parametrize(
    "answer, gold, expected, reason",
    [
        ("18 cents", "18", True, "units aren't compared"),
        ("42 km/h", "42", True, "nor compound ones"),
        ("$2\\sqrt{3}\\text{ cm}^2$", "2\\sqrt3", True, "nor after roots"),
        ("2\\pi units", "2\\pi", True, "nor after pi"),
        ("42x", "42", False, "a variable is no unit"),
        ("42 i", "42", False, "nor is i"),
        ("3 million", "3000000", True, "a scale is part of the number"),
        ("3 million", "3", False, "and never dropped"),
        ("5 dozen", "5", False, "dozens neither"),
        ("14 or more", "14", False, "hedge"),
        ("about 14", "14", False, "hedge"),
        ("not 42", "42", False, "denial"),
        ("1 4", "14", False, "two numbers aren't one"),
        ("1.414214", "\\sqrt{2}", False, "rounded"),
        ("50%", "0.5", True, "percentage as share"),
        ("50%", "50", True, "percentage as count"),
        ("50%", "0.5%", False, "two percentages"),
        ("x = 5, y = 2", "5", False, "two values for one"),
        ("x=1 or x=2", "2, 1", True, "list of solutions"),
        ("3 \\text{ and } 4", "4,3", True, "list in words"),
        ("\\{2,1\\}", "\\{1,2\\}", True, "sets have no order"),
        ("(2,1)", "(1,2)", False, "points do"),
        ("[1,2]", "(1,2)", False, "brackets of an interval"),
        ("x \\ge 3", "[3,\\infty)", True, "an inequality for its interval"),
        ("3 \\le y < 5", "[3,5)", True, "of two sides, in any variable"),
        ("[3,5)", "3 \\le x < 5", True, "an interval for its inequality"),
        ("x > 3", "[3,\\infty)", False, "the end counts"),
        ("3 \\le x \\le 5", "[3,5)", False, "both ends do"),
        ("y > 3", "x > 3", False, "two inequalities in two variables"),
        ("5 (mod 7)", "5", True, "a residue for its number"),
        ("5", "5 \\pmod{7}", True, "and the other way round"),
        ("x ≡ 12 (mod 7)", "5 \\pmod 7", True, "the same residue"),
        ("12", "5 (mod 7)", False, "without the modulus the number itself is meant"),
        ("5 (mod 8)", "5 (mod 7)", False, "another modulus"),
        ("1, 2, 3", "1, 2", False, "too many"),
        ("x=2", "y=2", False, "another variable"),
        ("y=2", "2", True, "an assignment has its value"),
        ("f(x)=2x", "2x", True, "a function too"),
        ("1==1", "1", False, "code"),
        ("½", "\\frac12", True, "Unicode fraction"),
        ("10³", "1000", True, "Unicode power"),
        ("٤٢", "42", True, "digits of another script"),
        ("(C)", "\\text{(C)}", True, "choice"),
        ("C", "\\text{(C)}", True, "choice, bare"),
        ("B", "\\text{(C)}", False, "other choice"),
        ("yx", "xy", True, "products commute"),
        ("(x+1)^2", "x^2+2x+1", True, "expanded"),
        ("(x+1)^2", "x^2+2x+2", False, "not the same"),
        ("\\binom{5}{2}", "10", True, "a binomial"),
        ("2 (\\cos x)", "2\\cos x", True, "a factor in brackets isn't an explanation"),
        ("999999999999999999999", "999999999999999999998", False, "big integers"),
    ],
)
def test_policies(answer: str, gold: str, expected: bool, reason: str) -> None:
    assert grade(f"Final Answer: {answer}", gold).correct is expected, reason


def test_a_grade_tells_its_reasons() -> None:
    verdict = grade("Final Answer: 41", "42")
    assert (verdict.correct, verdict.extracted, verdict.method, verdict.reason) == (False, "41", "number", "41 is not 42")
    assert grade("no idea", "42").method == "none" and grade("Final Answer: x+1", "1+x").method == "values"


def test_grade_many_equals_grade() -> None:
    pairs = [(row["prediction_text"], row["gold"]) for row in rows("grading_pairs.jsonl")[:60]] or [("Final Answer: 1+x", "x+1"), ("", "1")]
    assert grade_many(pairs, workers=2) == [grade(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("one", "other", "expected", "reason"),
    [
        ("(x+1)^3", "x^3+3x^2+3x+1", True, "expanded"),
        ("\\frac{\\sqrt2}{2}", "\\frac1{\\sqrt2}", True, "a root below the line"),
        ("\\sqrt2+\\sqrt3", "\\sqrt{5+2\\sqrt6}", True, "nested roots"),
        ("x^{10}", "x^5x^5", True, "powers"),
        ("2i+1", "1+2i", True, "whatever i means"),
        ("p-q", "q-p", False, "different"),
        ("i^2", "-1", None, "i may be a variable"),
        ("\\sqrt{x^2}", "x", None, "equal for some values only"),
        ("2\\pi", "6.28", None, "decimals"),
        ("1/2x", "\\frac x2", None, "can be read in two ways"),
        ("x^10", "x^{10}", None, "so can this"),
        ("3\\frac12", "\\frac72", None, "a mixed number"),
        ("f(x)", "xf", None, "a function"),
        ("\\sin x", "x", None, "a function by name"),
        ("ln x", "x ln", None, "a function without its backslash"),
        ("9^{9^{9}}", "1", None, "too large"),
        ("(" * 100 + "x" + ")" * 100, "x", None, "too deep"),
        ("1/0", "1/0", None, "no value"),
        ("x+", "x", None, "broken"),
    ],
)
def test_values_at_points(one: str, other: str, expected: bool | None, reason: str) -> None:
    assert same_value(one, other) is expected and same_value(other, one) is expected, reason


def test_values_never_contradict_math_verify_on_real_golds() -> None:
    """All expressions among the golds of MATH-500, against themselves and each other: over 100 are decided, each as math-verify does."""
    golds = sorted({row["answer"] for row in rows("math500.jsonl") if not row["answer"].strip("-").isdigit()})
    if not golds:
        pytest.skip("no shared data")
    rng = random.Random(0)
    pairs = [(gold, gold.replace(" ", "")) for gold in golds] + [(rng.choice(golds), rng.choice(golds)) for _ in range(100)]
    decided = [(one, other, verdict) for one, other in pairs if (verdict := same_value(one, other)) is not None]
    assert len(decided) > 100
    assert [pair for *pair, verdict in decided if symbolic.equal(*pair) != verdict] == []


# --- safety ---------------------------------------------------------------------------------------------------------------

HARD = ("Final Answer: $\\sin(x)+1$", "1+\\sin(x)")
"""A pair that only math-verify can decide."""


def test_integers_start_no_process() -> None:
    code = (
        "from parallel_r1.grading import grade; from parallel_r1 import symbolic; import sys\n"
        "assert grade('Final Answer: 42', '42').correct\n"
        "assert not grade('Final Answer: 41', '42').correct and not grade('junk', '42').correct\n"
        "assert not symbolic.POOL.idle and 'math_verify' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT)


def test_integers_are_quick() -> None:
    started = time.process_time()
    verdicts = grade_many([(f"Some work.\nFinal Answer: {n}", str(n + n % 2)) for n in range(5000)])
    assert sum(verdict.correct for verdict in verdicts) == 2500
    assert time.process_time() - started < 5


def test_signals_and_timers_of_the_caller_stay() -> None:
    fired = []
    before = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        assert grade(*HARD).correct
        assert signal.getsignal(signal.SIGALRM) is handler and signal.getitimer(signal.ITIMER_REAL)[0] > 50 and not fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_from_threads_and_asyncio() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(verdict.correct for verdict in pool.map(lambda _: grade(*HARD), range(12)))

    async def in_loop() -> bool:
        return grade(*HARD).correct

    assert asyncio.run(in_loop())


def test_inside_a_running_event_loop_with_a_task_beside_it() -> None:
    async def beside() -> list[bool]:
        verdicts = await asyncio.gather(*(asyncio.to_thread(grade, *HARD) for _ in range(4)))
        return [verdict.correct for verdict in verdicts]

    assert asyncio.run(beside()) == [True] * 4


def test_a_child_has_a_memory_limit() -> None:
    assert grade(*HARD).correct
    limits = Path(f"/proc/{symbolic.POOL.idle[-1].process.pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3:5] == [str(symbolic.MEMORY_BYTES)] * 2


def test_after_a_fork() -> None:
    """A forked process (a data loader's worker) must not talk to its parent's children."""
    assert grade(*HARD).correct
    process = os.fork()
    if process == 0:
        os._exit(0 if not symbolic.POOL.idle and grade(*HARD).correct else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert grade(*HARD).correct


def test_a_killed_child_is_replaced() -> None:
    assert grade(*HARD).correct
    for child in symbolic.POOL.idle:
        child.process.kill()
        child.process.wait()
    assert grade(*HARD).correct


@pytest.mark.parametrize(
    "answer, reason",
    [
        ("(" * 300 + "x" + ")" * 300, "300 parentheses"),
        ("x^{x^{x^{x^{9^{9^{9}}}}}}", "a tower with variables"),
        ("\\int_0^{10} \\sin(e^{x^{x}})\\,dx", "an integral without closed form"),
        ("\\sum_{k=1}^{10^{9}} \\frac{k!}{\\sqrt{k}}", "a long sum"),
        ("{" * 400, "braces"),
        ("(x+y+z+w+v)^{60}(x-y)^{60}", "a huge expansion"),
        ('__import__("os").system("touch pwned")', "code"),
        ("x" * 100_000, "100 kB"),
        ("\\sqrt{" * 150 + "2" + "}" * 150, "150 roots"),
    ],
)
def test_hostile_answers_are_wrong_within_a_bound(answer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grade(*HARD)
    started = time.monotonic()
    assert not grade(f"Final Answer: ${answer}$", "x^2+1").correct, reason
    assert time.monotonic() - started < symbolic.SECONDS * symbolic.PATIENCE
    assert not list(tmp_path.iterdir()), "nothing is evaluated as code"


def test_a_slow_comparison_is_killed_and_the_next_one_works() -> None:
    threads = threading.active_count()
    with pytest.raises(symbolic.TooSlow, match="no answer within its processor time"):
        symbolic.equal("(x+1)^{40}\\sin(x)", "(1+x)^{40}\\cos(x)", seconds=0.01)
    assert symbolic.equal("x+1", "1+x")
    assert threading.active_count() == threads


def test_children_end_with_their_parent() -> None:
    """Also when the parent is killed with -9."""
    code = (
        "from parallel_r1 import symbolic; import time\n"
        "symbolic.equal('x+1', '1+x'); print(symbolic.POOL.idle[0].process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
