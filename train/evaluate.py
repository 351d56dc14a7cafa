"""`python -m train eval`: perplexity of texts, multiple choice, and tasks of lm-eval (`harness`), as tables or JSON.

text       each file is a document, and every token is predicted once, after those before it, as many as the model was
           made for
choices    {"question": "...", "choices": ["...", ...], "answer": 1} a line, the answer by number or by text. A choice
           is scored as what follows its question and a space. Right is where the likeliest choice is the answer: by its
           log-likelihood, and by that over the bytes of the choice, which does not favour short ones
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import tyro
from rich import box
from rich.table import Table
from rich.text import Text

from train.command_line import cli
from train.config import ConfigError, counts, require
from train.running.report import Terminal
from train.trained.generate import Drawing, generate
from train.trained.likelihood import Part, likelihoods, of_texts
from train.trained.loaded import Loaded, Source, load
from yafsdp_fn import checkpoint
from yafsdp_fn.util import strict_json


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure a model of `python -m train clm`, or of a Hugging Face directory."""

    source: tyro.conf.OmitArgPrefixes[Source] = dataclasses.field(default_factory=Source)
    text: tuple[str, ...] = ()
    """Text files or globs: perplexity, per token and per byte."""
    choices: tuple[Path, ...] = ()
    """Files of multiple choice: {"question", "choices", "answer"} a line."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval, which must be installed."""
    limit: int | None = None
    """Only the first so many questions of a file, or examples of a task."""
    batch: int = 8
    """Texts that are computed at once."""
    json: bool = False
    """One JSON object on stdout, and nothing else."""

    def __post_init__(self) -> None:
        counts(self, batch=1)
        if self.limit is not None:
            counts(self, limit=1)
        asked = bool(self.choices or self.tasks)
        require(asked or bool(self.text), "nothing to measure: give --text, --choices or --tasks")
        require(asked or self.limit is None, "limit is of --choices and --tasks: a text is measured as a whole")


def main(argv: Sequence[str]) -> int:
    try:
        config = cli(Config, argv, prog="python -m train eval")
        texts = read_texts(config.text)
        questions = {file: read_questions(file) for file in config.choices}
        manager = known(config.tasks) if config.tasks else None
        show(config, measured(config, load(config.source), texts, questions, manager))
    except (ConfigError, checkpoint.CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def measured(
    config: Config,
    loaded: Loaded,
    texts: dict[str, str],
    questions: dict[Path, list[Question]],
    manager: Any = None,
) -> dict[str, Any]:
    """The result, as `--json` prints it. On all ranks together. manager: of `--tasks`"""
    found: dict[str, Any] = {"model": loaded.named}
    if texts:
        found["text"] = {
            each.name: {
                "tokens": each.tokens,
                "bytes": each.nbytes,
                "perplexity_per_token": each.per_token,
                "perplexity_per_byte": each.per_byte,
                "bits_per_byte": each.bits_per_byte,
            }
            for each in perplexities(loaded, texts, config.batch)
        }
    for file, of_file in questions.items():
        scores = accuracy(loaded, of_file[: config.limit], config.batch)
        found.setdefault("choices", {})[str(file)] = {
            "questions": scores.questions,
            "accuracy": scores.plain,
            "accuracy_error": scores.error(scores.plain),
            "accuracy_per_byte": scores.normalised,
            "accuracy_per_byte_error": scores.error(scores.normalised),
        }
    if config.tasks:
        found["tasks"] = results(loaded, config.tasks, config.limit, config.batch, manager)
    return found


def show(config: Config, found: dict[str, Any]) -> None:
    """Rank 0 writes."""
    console = Terminal(quiet=dist.get_rank() != 0)
    if config.json:
        console.out(json.dumps(found, indent=2, default=str), highlight=False)
        return
    console.print(Text(found["model"]), soft_wrap=True)
    if "text" in found:
        rows = [
            (name, f"{x['tokens']:,}", f"{x['bytes']:,}", *(f"{x[key]:.3f}" for key in PERPLEXITY))
            for name, x in found["text"].items()
        ]
        console.print(_table(("text", "tokens", "bytes", "perplexity a token", "a byte", "bits a byte"), rows))
    if "choices" in found:
        rows = [
            (name, f"{x['questions']:,}", *(f"{x[key]:.3f} ± {x[f'{key}_error']:.3f}" for key in ACCURACY))
            for name, x in found["choices"].items()
        ]
        console.print(_table(("multiple choice", "questions", "accuracy", "by likelihood a byte"), rows))
    if "tasks" in found:
        rows = [
            (task, name.partition(",")[0], f"{value:.4f}")
            for task, of_task in found["tasks"].items()
            for name, value in of_task.items()
            if isinstance(value, float)
        ]
        console.print(_table(("task", "metric", "value"), rows))


PERPLEXITY = ("perplexity_per_token", "perplexity_per_byte", "bits_per_byte")
ACCURACY = ("accuracy", "accuracy_per_byte")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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


def read_questions(file: Path) -> list[Question]:
    """Raises ConfigError that names the line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # JSON has other ends of lines inside of texts
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
    question = found.get("question")
    choices = found.get("choices")
    answer = found.get("answer")
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
    """The accuracy, by all ranks together. Raises ConfigError for a choice that the model is too short for."""
    parts = [pair(loaded, each.question, f" {choice}") for each in questions for choice in each.choices]
    found = iter(likelihoods(loaded, parts, batch))
    plain = normalised = 0
    for each in questions:
        nats = [next(found).nats for _ in each.choices]
        rates = [sum_ / len(choice.encode()) for sum_, choice in zip(nats, each.choices, strict=True)]
        plain += nats.index(max(nats)) == each.answer
        normalised += rates.index(max(rates)) == each.answer
    return Accuracy(len(questions), plain / len(questions), normalised / len(questions))


class Perplexity(NamedTuple):
    """The perplexity of one text, or of several together; nats are of all tokens."""

    name: str
    tokens: int
    nbytes: int
    nats: float

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        return math.exp(self.nats / self.nbytes)

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, which are the same at any tokenizer."""
        return self.nats / self.nbytes / math.log(2)


def read_texts(patterns: Sequence[str]) -> dict[str, str]:
    """Texts by the names of their files. Raises ConfigError where a pattern has none, or one is no text."""
    found: dict[str, str] = {}
    for pattern in patterns:
        files = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        require(bool(files), f"--text {pattern}: no such file")
        for file in files:
            try:
                found[str(file)] = file.read_bytes().decode()  # with the ends of lines that are there, as in training
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--text {file}: cannot be read as UTF-8 text: {error}") from error
            require(bool(found[str(file)]), f"--text {file}: it is empty")
    return found


def perplexities(loaded: Loaded, texts: dict[str, str], batch: int) -> list[Perplexity]:
    """The perplexity of each text, and of all of them last, where there are several."""
    each = [
        Perplexity(name, tokens, len(text.encode()), -nats)
        for (name, text), (tokens, nats) in zip(
            texts.items(), of_texts(loaded, list(texts.values()), batch), strict=True
        )
    ]
    if len(each) < 2:
        return each
    return [*each, Perplexity("all", *(sum(column) for column in list(zip(*each, strict=True))[1:]))]


LENGTH = 256
"""Tokens that a task generates at most, where it does not say."""


def library() -> Any:
    """Raises ConfigError where lm-eval is not installed."""
    try:
        importlib.import_module("lm_eval.api.model")
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise ConfigError(f"--tasks needs the library lm-eval: pip install lm_eval ({error})") from None


def known(tasks: Sequence[str]) -> Any:
    """lm-eval's manager of tasks. Raises ConfigError where it has not all of these."""
    library()
    manager = importlib.import_module("lm_eval.tasks").TaskManager()
    if missing := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(f"--tasks: lm-eval has no {', '.join(missing)}; `lm_eval ls tasks` lists what it has")
    return manager


def results(loaded: Loaded, tasks: Sequence[str], limit: int | None, batch: int, manager: Any) -> dict[str, Any]:
    """`{task: {metric: value}}`; nothing on ranks but the first of a machine, to which lm-eval tells all of it."""
    told = library().simple_evaluate(
        model(loaded, batch), tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
    )
    return {} if told is None else dict(told["results"])


def model(loaded: Loaded, batch: int) -> Any:
    """An `lm_eval.api.model.LM`."""

    class Model(library().api.model.LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            parts = [pair(loaded, *request.args) for request in requests]
            return [(each.nats, each.best) for each in likelihoods(loaded, parts, batch)]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            return [nats for _, nats in of_texts(loaded, [request.args[0] for request in requests], batch)]

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            out: list[str] = []
            for _options, alike in itertools.groupby(requests, lambda request: repr(request.args[1])):
                group = list(alike)
                for at in range(0, len(group), batch):
                    some = group[at : at + batch]
                    texts = generated(loaded, [request.args[0] for request in some], some[0].args[1])
                    for request, text in zip(some, texts, strict=True):
                        self.cache_hook.add_partial("generate_until", request.args, text)
                    out += texts
            return out

    return Model()


def generated(loaded: Loaded, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Generates what follows each context, up to the first of `until`, which is left out."""
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    length = options.get("max_gen_toks", LENGTH)
    draws = options.get("do_sample", False) or options.get("temperature", 0.0) > 0
    how = Drawing(
        temperature=options.get("temperature", 1.0) if draws else 0.0,
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
    )
    encoded = (list(map(int, each)) or [loaded.tokenizer.end] for each in loaded.tokenizer.encode(contexts))
    prompts = [each[-max(1, loaded.most - length) :] for each in encoded]
    added: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    for step in generate(loaded, prompts, length, how):
        for at, token in enumerate(step):
            if token is not None:
                added[at].append(token)
                texts[at] = loaded.text(prompts[at], added[at])
        stopped = [
            token is None or any(stop in text for stop in until) for token, text in zip(step, texts, strict=True)
        ]
        if all(stopped):
            break
    return [min((text.split(stop)[0] for stop in until), key=len, default=text) for text in texts]
