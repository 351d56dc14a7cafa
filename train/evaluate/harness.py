"""A model as lm-eval takes one: its tasks, its metrics, our forward passes.

    from lm_eval import simple_evaluate
    simple_evaluate(model(loaded, batch=8), tasks=["arc_easy"])

All ranks call it alike, and compute together: lm-eval sees one.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from train.config import ConfigError
from train.evaluate.choices import pair
from train.trained.generate import Drawing, generate
from train.trained.likelihood import documents, likelihoods, windows
from train.trained.loaded import Loaded

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
            rows = documents(loaded, [request.args[0] for request in requests])
            cut = [list(windows(tokens, first, loaded.most)) for first, tokens in rows]
            found = iter(likelihoods(loaded, [part for parts in cut for part in parts], batch))
            return [sum(next(found).nats for _ in parts) for parts in cut]

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
    """What follows each context, up to the first of `until`, which is left out."""
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
    for step in generate(
        loaded.model,
        loaded.params,
        prompts,
        length,
        how,
        ends=loaded.ends,
        vocab=loaded.vocab,
        dtype=loaded.dtype,
        device=loaded.device,
    ):
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
