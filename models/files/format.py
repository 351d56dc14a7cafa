"""The file format of a family: tensor names, and the leaves that files hold in another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from models.parts.config import Shape
from models.parts.tree import Parts

C = TypeVar("C", bound=Shape)


class Form(NamedTuple):
    """The form in which files hold a leaf (one layer's, of a stack) that they do not hold as it is.

    names: of the files' tensors, after the unit's prefix; join: makes the leaf from them; split: makes them from the
    leaf
    """

    names: Sequence[str]
    join: Callable[[list[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


PREFIX = Parts(embed="model.embed_tokens.", layers="model.layers.{layer}.", head="")
"""Prefix of the names of each part's leaves."""


def as_it_is(key: str) -> Form:
    return Form((key,), lambda tensors: tensors[0], lambda leaf: (leaf,))


def transposed(key: str) -> Form:
    return Form((key,), lambda tensors: tensors[0].t(), lambda leaf: (leaf.t(),))


@dataclasses.dataclass(frozen=True)
class Format(Generic[C]):
    """The file format of a family.

    name: the model's name in errors; params: the family's own; prefix: of the names of each part's leaves
    forms: of leaves, by key; known_as: maps a tensor's name to ours, to None if it is no weight
    embedding: key of the matrix to which a head may be tied
    no_linear: keys of matrices that are not linear layers in transformers, so that peft has no adapter for them
    fan_in_fan_out: layers hold matrices as [in, out], in peft's words
    """

    name: str
    params: Callable[..., Parts]
    read_config: Callable[[Mapping[str, Any], str], C]
    write_config: Callable[[C, torch.dtype], dict[str, Any]]
    prefix: Parts = PREFIX
    forms: Callable[[C], Mapping[str, Form]] = lambda config: {}
    known_as: Callable[[str], str | None] = lambda name: None if name.endswith("rotary_emb.inv_freq") else name
    embedding: str = "weight"
    no_linear: tuple[str, ...] = ()
    fan_in_fan_out: bool = False

    def names(self, config: C) -> Iterator[str]:
        """Yields every tensor name of a model's files."""
        abstract, forms = self.params(config), self.forms(config)

        def of(prefix: str, keys: Mapping[str, Any]) -> Iterator[str]:
            for key in keys:
                yield from (prefix + name for name in forms.get(key, as_it_is(key)).names)

        yield from of(self.prefix.embed, abstract.embed)
        for layer in range(config.layers):
            yield from of(self.prefix.layers.format(layer=layer), abstract.layers.tree)
        yield from of(self.prefix.head, abstract.head)
