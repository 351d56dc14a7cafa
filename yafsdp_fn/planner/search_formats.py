"""ya.planner.search_formats: what formats and places of moments save, and what each loses of a state's own values.

    for wire in (whole, *wires):
        for place in (whole, *moments):
            search(traced(params in wire, tx with moments in place), cluster)

Needs torch. Nothing is tried that is not asked for.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from yafsdp_fn.api.relative_errors import relative_errors
from yafsdp_fn.communication.formats import Format, Wire
from yafsdp_fn.optim import GradientTransformation, in_format, on_host
from yafsdp_fn.params.sources import with_wire
from yafsdp_fn.params.tree import Tree, named_leaves
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.planner.search import Found, search
from yafsdp_fn.program.trace import Trace


class FormatsFound(NamedTuple):
    """The choices that `search_formats` has tried.

    choices: wire format, or "whole", and place of moments -> the fastest schedule that fits; the fastest choice first
    errors: format -> unit -> error, as `ya.formats.relative_errors` measures it

    >>> def traced(params, tx):
    ...     return ya.planner.trace(loss_fn, params, batch, tx=tx, ranks=16)
    >>> wires = [ya.Wire(gather=ya.formats.Scaled())]
    >>> found = ya.planner.search_formats(traced, params, tx, "a100-80g", state, wires=wires)
    >>> sorted(found.choices), list(found.errors["int8/64"])[:2]
    (['gather=int8/64', 'whole'], ['layers[0]', 'layers[1]'])
    """

    choices: dict[str, Found]
    errors: dict[str, dict[str, float]]

    def __str__(self) -> str:
        """Returns a line for each choice, with what it saves of the step that is whole, and one for each format."""
        lines: list[str] = []
        for name, found in self.choices.items():
            lines.append(f"{name}: {str(found).splitlines()[0]}")
            if "whole" in self.choices:
                whole = self.choices["whole"].best
                best = found.best
                nbytes = whole.peak_bytes - best.peak_bytes
                lines[-1] += f", saves {1e3 * (whole.step_s - best.step_s):.1f} ms, {nbytes / 2**30:.2f} GiB"
        lines += [f"{name} is off by at most {max(of.values()):.2%} of a unit" for name, of in self.errors.items()]
        return "\n".join(lines)


def search_formats(
    traced: Callable[[Tree, GradientTransformation], Trace],
    params: Tree,
    tx: GradientTransformation,
    cluster: str | Cluster,
    state: Any,
    *,
    wires: Sequence[Wire] = (),
    moments: Sequence[Format | Literal["host"]] = (),
    **more: Any,
) -> FormatsFound:
    """Searches the fastest schedule without formats, with each of `wires`, with each of `moments`, and with each pair,
    and measures what the formats lose of the values of `state`. What does not fit is left out. Every rank must call it.

    traced: a function around `ya.planner.trace`: the step of such params and such an optimizer
    state: a `ShardedState`, whose weights and moments are measured
    wires: as `ya.params.with_wire` takes them; moments: formats, as `ya.optim.in_format` takes them, and "host"
    more: arguments of `search`, such as memory

    >>> def traced(params, tx):
    ...     return ya.planner.trace(loss_fn, params, batch, tx=tx, ranks=16)
    >>> asked = {"wires": [ya.Wire(gather=ya.formats.Scaled())], "moments": [ya.formats.Roots(), "host"]}
    >>> found = ya.planner.search_formats(traced, params, tx, "a100-80g", state, **asked, memory=2**30)
    >>> len(found.choices), list(found.errors)
    (6, ['int8/64', 'roots/64'])
    """
    errors: dict[str, dict[str, float]] = {}
    trees = {"whole": params}
    for wire in wires:
        trees[str(wire)] = light = with_wire(params, wire)
        if wire.gather is not None:
            inside = {path for path, leaf in named_leaves(light) if getattr(leaf, "wire", None) == wire}
            errors[wire.gather.name] = relative_errors(wire.gather, state.params, inside.__contains__)
    txs = {"": tx}
    for place in moments:
        if place == "host":
            txs[", moments on the host"] = on_host(tx)
        else:
            encoded = in_format(tx, place)
            txs[f", moments in {place.name}"] = encoded
            errors[place.name] = relative_errors(place, state.opt_state)
    choices: dict[str, Found] = {}
    for of_wire, tree in trees.items():
        for of_moments, placed in txs.items():
            with suppress(DoesNotFit):
                choices[of_wire + of_moments] = search(traced(tree, placed), cluster, **more)
    return FormatsFound(dict(sorted(choices.items(), key=lambda item: item[1].best.step_s)), errors)
