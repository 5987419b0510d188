"""The markup of parallel thinking: the one place where its tags are spelled, its grammar, and its canonical spelling.

    main <Parallel><Path>one way</Path><Path>another way</Path></Parallel>
    <Summary>what both say</Summary> main ... Final Answer: 42

One grammar (`_Grammar`) judges two kinds of input. `validate` reads a *text* of a teacher: whatever looks like a tag is one, and near-miss
tags (`<PARALLEL>`, `<Path >`, `<Path/>`, full-width brackets) are faults. `validate_ids` reads *token ids* of a rollout: only the six tag
ids are tags, and characters that merely spell one are text. An empty list of faults means valid; a text without any block is valid too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

OPEN_PARALLEL = "<Parallel>"
CLOSE_PARALLEL = "</Parallel>"
OPEN_PATH = "<Path>"
CLOSE_PATH = "</Path>"
OPEN_SUMMARY = "<Summary>"
CLOSE_SUMMARY = "</Summary>"
TAGS = (OPEN_PARALLEL, CLOSE_PARALLEL, OPEN_PATH, CLOSE_PATH, OPEN_SUMMARY, CLOSE_SUMMARY)

BLOCK_CLOSER = f"{CLOSE_PARALLEL}\n{OPEN_SUMMARY}"
"""What the engine forces after the last path: the canonical spelling has exactly one line break here."""

FINAL_ANSWER = "Final Answer:"
"""What stands before the answer of a response."""

EOS_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<eos>", "</s>")
"""Spellings of end-of-sequence tokens; a tokenizer would end the response in the middle of such a text."""


@dataclass(frozen=True)
class Fault:
    """What is wrong at one place. `position` counts characters (texts) or tokens (ids) from 0."""

    code: str
    position: int
    message: str


# --- lexemes --------------------------------------------------------------------------------------------------------------

_TEXT, _BLANK, _EOS = "text", "blank", "eos"


@dataclass(frozen=True)
class _Lexeme:
    """A piece of the input: a tag (`kind` is its canonical spelling), running text, blank space, or an end-of-sequence mark."""

    kind: str
    start: int
    end: int
    exact: bool = True
    self_closing: bool = False


_OPENERS = "<＜〈⟨‹"
_CLOSERS = ">＞〉⟩›"
_NAMES = {"parallel": "Parallel", "path": "Path", "paths": "Path", "summary": "Summary"}
_MAX_TAG = 120
"""Characters of the longest thing taken for a tag; keeps the scanner linear on hostile input."""


def _lex(text: str) -> Iterator[_Lexeme]:
    done = position = 0
    while (position := _next_opener(text, position)) < len(text):
        lexeme = _eos_at(text, position) or _tag_at(text, position)
        if lexeme is None:
            position += 1
            continue
        yield from _plain(text, done, position)
        yield lexeme
        done = position = lexeme.end
    yield from _plain(text, done, len(text))


def _next_opener(text: str, start: int) -> int:
    while start < len(text) and text[start] not in _OPENERS:
        start += 1
    return start


def _plain(text: str, start: int, end: int) -> Iterator[_Lexeme]:
    if start < end:
        yield _Lexeme(_BLANK if text[start:end].isspace() else _TEXT, start, end)


def _eos_at(text: str, start: int) -> _Lexeme | None:
    spelling = next((eos for eos in EOS_TEXTS if text.startswith(eos, start)), None)
    return _Lexeme(_EOS, start, start + len(spelling)) if spelling else None


def _tag_at(text: str, start: int) -> _Lexeme | None:
    """The tag, exact or nearly so, that begins at `start`; None where it's only a bracket."""
    exact = next((tag for tag in TAGS if text.startswith(tag, start)), None)
    if exact:
        return _Lexeme(exact, start, start + len(exact))
    limit = min(len(text), start + _MAX_TAG)
    at = _skip_spaces(text, start + 1, limit)
    closing = at < limit and text[at] in "/\\／"
    if closing:
        at = _skip_spaces(text, at + 1, limit)
    name_end = at
    while name_end < limit and text[name_end].isalpha():
        name_end += 1
    name = _NAMES.get(text[at:name_end].lower())
    if name is None:
        return None
    end = _near_miss_end(text, name_end, limit, spaced=text[start + 1].isspace())
    if end is None:
        return None
    self_closing = text[name_end : end - 1].strip().endswith("/")
    return _Lexeme(f"<{'/' if closing else ''}{name}>", start, end, exact=False, self_closing=self_closing)


def _skip_spaces(text: str, at: int, limit: int) -> int:
    while at < limit and text[at].isspace():
        at += 1
    return at


def _near_miss_end(text: str, name_end: int, limit: int, spaced: bool) -> int | None:
    """Where a near-miss tag ends. With a space before its name only a bare one counts, so that `a < path and b > c` stays a comparison."""
    end = name_end
    while end < limit and text[end] not in _CLOSERS and text[end] not in _OPENERS and text[end] != "\n":
        end += 1
    if end < limit and text[end] in _CLOSERS:
        bare = not text[name_end:end].strip(" \t/\\")
        return end + 1 if bare or not spaced else None
    return None if spaced else name_end


# --- grammar --------------------------------------------------------------------------------------------------------------

_State = Literal["main", "block", "path", "joined", "summary"]


@dataclass
class _Grammar:
    """Reads lexemes one by one and collects faults. After a fault it goes on as the tag suggests, so that one slip gives few faults.

    States: main thread; block (inside <Parallel>, between paths); path; joined (after </Parallel>, before <Summary>); summary.
    """

    num_paths: int | None
    faults: list[Fault] = field(default_factory=list)
    state: _State = "main"
    opened_at: int = 0
    body_is_blank: bool = True
    paths: int = 0
    gap_text_at: int | None = None
    last_close: int = 0

    def fault(self, code: str, position: int, message: str) -> None:
        self.faults.append(Fault(code, position, message))

    def read(self, lexeme: _Lexeme) -> None:
        """Take the next lexeme."""
        if not lexeme.exact:
            self.fault("near_miss_tag", lexeme.start, f"this is nearly {lexeme.kind}, but not spelled so")
            if lexeme.self_closing:
                return
        if lexeme.kind == _TEXT:
            self._text(lexeme.start)
        elif lexeme.kind == _EOS:
            self.fault("eos", lexeme.start, f"an end-of-sequence mark in the {self.state}")
        elif lexeme.kind != _BLANK:
            self._TAG_READERS[lexeme.kind](self, lexeme.start, lexeme.end)

    def finish(self, position: int) -> None:
        """The input ended."""
        if self.state == "path":
            self.fault("unclosed_path", self.opened_at, f"{OPEN_PATH} without {CLOSE_PATH}")
        elif self.state == "block":
            self.fault("unclosed_parallel", self.opened_at, f"{OPEN_PARALLEL} without {CLOSE_PARALLEL}")
        elif self.state == "joined":
            self._no_summary(position)
        elif self.state == "summary":
            self.fault("unclosed_summary", self.opened_at, f"{OPEN_SUMMARY} without {CLOSE_SUMMARY}")

    def _text(self, position: int) -> None:
        self.body_is_blank = False
        if self.state == "block":
            self.fault("text_between_paths", position, f"text inside {OPEN_PARALLEL}, but in no path")
        elif self.state == "joined" and self.gap_text_at is None:
            self.gap_text_at = position

    def _enter(self, state: _State, position: int) -> None:
        self.state, self.opened_at, self.body_is_blank = state, position, True

    def _open_parallel(self, start: int, end: int) -> None:
        if self.state == "joined":
            self._no_summary(start)
        elif self.state == "summary":
            self.fault("unclosed_summary", start, f"{OPEN_PARALLEL} in a summary")
        elif self.state != "main":
            self.fault("nested_block", start, f"{OPEN_PARALLEL} in a {self.state}")
        self.paths = 0
        self._enter("block", start)

    def _close_parallel(self, start: int, end: int) -> None:
        if self.state not in ("block", "path"):
            self._stray(start, CLOSE_PARALLEL)
            return
        if self.state == "path":
            self.fault("unclosed_path", self.opened_at, f"{CLOSE_PARALLEL} comes before {CLOSE_PATH}")
        self._leave_block(start)
        self._enter("joined", end)

    def _open_path(self, start: int, end: int) -> None:
        if self.state not in ("block", "path"):
            self._stray(start, OPEN_PATH)
            return
        if self.state == "path":
            self.fault("unclosed_path", self.opened_at, f"another {OPEN_PATH} comes before {CLOSE_PATH}")
        self.paths += 1
        self._enter("path", start)

    def _close_path(self, start: int, end: int) -> None:
        if self.state != "path":
            self._stray(start, CLOSE_PATH)
            return
        if self.body_is_blank:
            self.fault("empty_path", self.opened_at, "a path without text")
        self._enter("block", self.opened_at)

    def _open_summary(self, start: int, end: int) -> None:
        if self.state in ("main", "summary"):
            self._stray(start, OPEN_SUMMARY)
            return
        if self.state == "path":
            self.fault("unclosed_path", self.opened_at, f"{OPEN_SUMMARY} comes before {CLOSE_PATH}")
        if self.state in ("path", "block"):
            self.fault("unclosed_parallel", start, f"{OPEN_SUMMARY} comes before {CLOSE_PARALLEL}")
            self._leave_block(start)
        elif self.gap_text_at is not None:
            self.fault("text_before_summary", self.gap_text_at, f"text between {CLOSE_PARALLEL} and {OPEN_SUMMARY}")
        self.gap_text_at = None
        self._enter("summary", start)

    def _close_summary(self, start: int, end: int) -> None:
        if self.state == "joined":
            self._no_summary(start)
        elif self.state != "summary":
            self._stray(start, CLOSE_SUMMARY)
            return
        elif self.body_is_blank:
            self.fault("empty_summary", self.opened_at, "a summary without text")
        self.last_close = end
        self._enter("main", end)

    def _leave_block(self, position: int) -> None:
        if self.num_paths is not None and self.paths != self.num_paths:
            self.fault("wrong_path_count", position, f"{self.paths} paths in the block, {self.num_paths} are asked for")
        elif self.paths < 2:
            self.fault("too_few_paths", position, f"{self.paths} paths in the block, at least 2 are asked for")

    def _no_summary(self, position: int) -> None:
        self.fault("missing_summary", self.opened_at, f"no {OPEN_SUMMARY} after {CLOSE_PARALLEL}")
        self.gap_text_at = None

    def _stray(self, position: int, tag: str) -> None:
        where = {"main": "outside a block", "joined": f"between {CLOSE_PARALLEL} and {OPEN_SUMMARY}"}.get(self.state, f"in a {self.state}")
        self.fault("stray_tag", position, f"{tag} {where}")

    _TAG_READERS = {
        OPEN_PARALLEL: _open_parallel,
        CLOSE_PARALLEL: _close_parallel,
        OPEN_PATH: _open_path,
        CLOSE_PATH: _close_path,
        OPEN_SUMMARY: _open_summary,
        CLOSE_SUMMARY: _close_summary,
    }


# --- texts ----------------------------------------------------------------------------------------------------------------


def validate(text: str, num_paths: int | None = None) -> list[Fault]:
    """Faults of a teacher's text, by position; none means valid. `num_paths` asks for exactly so many paths per block, None for 2 or more.

    The text is a response without its prompt. It must hold exactly one `Final Answer:`, in the main thread after the last summary.
    """
    grammar = _Grammar(num_paths)
    answers: list[tuple[int, _State]] = []
    for lexeme in _lex(text):
        if lexeme.kind == _TEXT:
            answers += [(position, grammar.state) for position in _answers(text, lexeme.start, lexeme.end)]
        grammar.read(lexeme)
    grammar.finish(len(text))
    return sorted(grammar.faults + _answer_faults(answers, grammar.last_close, len(text)), key=lambda fault: fault.position)


def _answers(text: str, start: int, end: int) -> Iterator[int]:
    while (start := text.find(FINAL_ANSWER, start, end)) >= 0:
        yield start
        start += len(FINAL_ANSWER)


def _answer_faults(answers: list[tuple[int, _State]], last_close: int, end: int) -> list[Fault]:
    faults = []
    final = []
    for position, state in answers:
        if state == "main" and position >= last_close:
            final.append(position)
        else:
            where = "before the last summary" if state in ("main", "joined") else f"in a {state}"
            faults.append(Fault("misplaced_answer", position, f"'{FINAL_ANSWER}' {where}"))
    if not final:
        faults.append(Fault("missing_answer", end, f"no '{FINAL_ANSWER}' in the main thread after the last summary"))
    faults += [Fault("several_answers", position, f"'{FINAL_ANSWER}' stands here again") for position in final[1:]]
    return faults


def canonicalise(text: str) -> str:
    """The spelling that the engine forces: no white space between the tags of a block, one line break before `<Summary>`.

    Bodies and the main thread stay as they are. Meant for valid texts; faults are left in place.
    """
    pieces: list[str] = []
    gap = ""
    before = None
    for lexeme in _lex(text):
        piece = text[lexeme.start : lexeme.end]
        if lexeme.kind == _BLANK:
            gap = piece
            continue
        pieces.append(_canonical_gap(before, lexeme.kind, gap))
        pieces.append(piece)
        gap, before = "", lexeme.kind
    return "".join(pieces) + gap


def _canonical_gap(before: str | None, after: str, gap: str) -> str:
    if (before, after) == (CLOSE_PARALLEL, OPEN_SUMMARY):
        return "\n"
    inside_block = before in (OPEN_PARALLEL, CLOSE_PATH) and after in (OPEN_PATH, CLOSE_PARALLEL)
    return "" if inside_block else gap


# --- token ids ------------------------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What this module asks of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""

    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        """Texts of id sequences."""


@dataclass(frozen=True)
class TagIds:
    """The ids that carry structure in one tokenizer. `blank`: ids that decode to white space only. `eos`: ids that end a response."""

    parallel: int
    parallel_end: int
    path: int
    path_end: int
    summary: int
    summary_end: int
    eos: frozenset[int]
    blank: frozenset[int] = frozenset()

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TagIds:
        """Look the tags up in a tokenizer. Raises ValueError where one of them isn't a single token."""
        vocab = tokenizer.get_vocab()
        missing = [tag for tag in TAGS if tag not in vocab]
        if missing:
            raise ValueError(f"the tokenizer has no single token for {', '.join(missing)}: add the tags before use (method.md section 4)")
        eos = {vocab[text] for text in EOS_TEXTS if text in vocab}
        if tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        ids = sorted(set(vocab.values()))
        texts = tokenizer.batch_decode([[i] for i in ids])
        blank = frozenset(i for i, text in zip(ids, texts, strict=True) if text.isspace())
        return cls(*(vocab[tag] for tag in TAGS), eos=frozenset(eos), blank=blank)

    def kinds(self) -> dict[int, str]:
        """Lexeme kind of every id that isn't running text."""
        order = (self.parallel, self.parallel_end, self.path, self.path_end, self.summary, self.summary_end)
        return {**dict.fromkeys(self.blank, _BLANK), **dict.fromkeys(self.eos, _EOS), **dict(zip(order, TAGS, strict=True))}


def validate_ids(ids: Sequence[int], tags: TagIds, num_paths: int | None = None) -> list[Fault]:
    """Faults of a response's markup, judged by token ids; positions are token indices. An end-of-sequence id may only stand last.

    The answer isn't looked at: that is the grader's work.
    """
    kinds = tags.kinds()
    grammar = _Grammar(num_paths)
    body = ids[:-1] if ids and ids[-1] in tags.eos else ids
    for index, token in enumerate(body):
        grammar.read(_Lexeme(kinds.get(token, _TEXT), index, index + 1))
    grammar.finish(len(body))
    return sorted(grammar.faults, key=lambda fault: fault.position)
