"""Multiple choice: {"question": "...", "choices": ["...", ...], "answer": 1} a line, the answer by number or by text.

A choice is scored as what follows its question and a space. Right is where the likeliest choice is the answer: by its
log-likelihood, and by that over the bytes of the choice, which does not favour short ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from train.config import ConfigError, require
from train.trained.likelihood import Part, likelihoods
from train.trained.loaded import Loaded
from yafsdp_fn import strict_json


class Question(NamedTuple):
    question: str
    choices: tuple[str, ...]
    answer: int


class Accuracy(NamedTuple):
    """Parts of the questions that were answered right."""

    questions: int
    plain: float
    normalised: float

    def error(self, part: float) -> float:
        """Standard error of one of them."""
        return math.sqrt(part * (1 - part) / self.questions)


def read(file: Path) -> list[Question]:
    """Raises ConfigError that names the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--choices {file}: cannot be read: {error}") from error
    found = [_question(f"--choices {file}: line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
    require(bool(found), f"--choices {file}: it is empty")
    return found


def _question(where: str, line: str) -> Question:
    try:
        value = strict_json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    found: dict[str, Any] = value if isinstance(value, dict) else {}
    question, choices, answer = found.get("question"), found.get("choices"), found.get("answer")
    if not (_text(question) and isinstance(choices, list) and len(choices) > 1 and all(map(_text, choices))):
        raise ConfigError(f"{where}: expected {EXPECTED}")
    if answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        one_of = f"one of the {len(choices)} choices, or its number from 0"
        raise ConfigError(f"{where}: the answer is {answer!r:.60}: expected {one_of}")
    return Question(str(question), tuple(choices), answer)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


EXPECTED = 'an object with a "question", two or more "choices" and an "answer", texts that are not empty'


def pair(loaded: Loaded, context: str, target: str) -> Part:
    """Tokens of a context and of what follows it, cut where the tokens of both together are: where a tokenizer joins
    letters across the border, that is the context's last token. Blanks at the context's end go to the target."""
    kept = context.rstrip()
    before, whole = ([*map(int, each)] for each in loaded.tokenizer.encode([kept, context + target]))
    return Part(whole[: len(before)] or [loaded.tokenizer.end], whole[len(before) :])


def accuracy(loaded: Loaded, questions: Sequence[Question], batch: int) -> Accuracy:
    """On all ranks together. Raises ConfigError for a choice that the model is too short for."""
    parts = [pair(loaded, each.question, f" {choice}") for each in questions for choice in each.choices]
    found = iter(likelihoods(loaded, parts, batch))
    plain = normalised = 0
    for each in questions:
        nats = [next(found).nats for _ in each.choices]
        rates = [sum_ / len(choice.encode()) for sum_, choice in zip(nats, each.choices, strict=True)]
        plain += nats.index(max(nats)) == each.answer
        normalised += rates.index(max(rates)) == each.answer
    return Accuracy(len(questions), plain / len(questions), normalised / len(questions))
