"""ya.planner.search_formats: what formats and places of moments save, and what each loses of a user's own values.

    for wire in (whole, *wires):
        for place in (whole, *moments):
            search(traced(params in wire, tx with moments in place), cluster)

Needs torch. Nothing is tried that is not asked for.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from yafsdp_fn.api.relative_errors import relative_errors
from yafsdp_fn.communication.formats import WHOLE, Format, Wire
from yafsdp_fn.optim.base import GradientTransformation
from yafsdp_fn.optim.in_format import in_format
from yafsdp_fn.optim.on_host import on_host
from yafsdp_fn.params.sources import with_wire
from yafsdp_fn.params.tree import Tree, named_leaves
from yafsdp_fn.planner.cluster import Cluster
from yafsdp_fn.planner.plan import DoesNotFit
from yafsdp_fn.planner.search import Found, search
from yafsdp_fn.program.trace import Trace, columns
from yafsdp_fn.timeline.text import shown

Place = Format | Literal["host"]
Errors = dict[str, dict[str, float]]


class FormatChoice(NamedTuple):
    """A wire format and a place of moments, with the fastest schedule that fits.

    params, tx: what `ya.init` takes for it, on `ya.mesh(**found.mesh)`
    found: None where nothing fits
    errors: of "weights", "gradients" and "moments", where they are in a format and were measured: unit -> error, as
        `ya.formats.relative_errors`

    >>> def traced(params, tx):
    ...     return ya.planner.trace(loss_fn, params, batch, tx=tx, ranks=16)
    >>> asked = {"wires": [ya.Wire(gather=ya.formats.Scaled())], "state": state}
    >>> choice = ya.planner.search_formats(traced, params, tx, "a100-80g", **asked).choices[1]
    >>> choice.name, choice.params["layers"].tree["up"].wire.gather.name, list(choice.errors["weights"])[:2]
    ('gather=int8/64', 'int8/64', ['layers[0]', 'layers[1]'])
    """

    wire: Wire
    moments: Place | None
    params: Tree
    tx: GradientTransformation
    found: Found | None
    errors: Errors

    @property
    def name(self) -> str:
        where = self.moments.name if isinstance(self.moments, Format) else self.moments
        words = [str(self.wire), f"moments={where}" if where else ""]
        return ", ".join(filter(None, words)) or "whole"


@dataclasses.dataclass(frozen=True, repr=False)
class FormatsFound:
    """What `search_formats` found. choices: the first is the step without what was asked for

    >>> def traced(params, tx):
    ...     return ya.planner.trace(loss_fn, params, batch, tx=tx, ranks=16)
    >>> found = ya.planner.search_formats(traced, params, tx, "a100-80g", moments=["host"], state=state)
    >>> [choice.name for choice in found.choices], found.best.name
    (['whole', 'moments=host'], 'whole')
    """

    choices: tuple[FormatChoice, ...]

    @property
    def best(self) -> FormatChoice:
        """The fastest that fits; of equally fast ones the first, so that no format is taken for nothing."""
        fitting = [(choice.found.best.step_s, number) for number, choice in enumerate(self.choices) if choice.found]
        return self.choices[min(fitting)[1]]

    def __repr__(self) -> str:
        return f"FormatsFound({', '.join(choice.name for choice in self.choices)})"

    def __str__(self) -> str:
        """Returns a table: what each choice takes and saves of the first one, and its largest error of any unit."""
        rows = [["", "step", "saves", "a rank", "saves", "weights off", "gradients off", "moments off"]]
        first = self.choices[0].found
        for choice in self.choices:
            cells = ["does not fit", "", "", ""]
            if choice.found is not None:
                best = choice.found.best
                cells = [shown(best.step_s, 4), "", f"{best.peak_bytes / 2**30:.1f} GiB", ""]
                if first is not None and choice.found is not first:
                    cells[1] = f"{1e3 * (first.best.step_s - best.step_s):.1f} ms"
                    cells[3] = f"{(first.best.peak_bytes - best.peak_bytes) / 2**30:.1f} GiB"
            rows.append([choice.name, *cells, *(_largest(choice.errors.get(of)) for of in OF)])
        best = self.best
        assert best.found is not None
        return "\n".join([*columns(rows), f"fastest: {best.name}, {best.found.best.point}"])


OF = ("weights", "gradients", "moments")


def _largest(errors: dict[str, float] | None) -> str:
    if not errors:
        return ""
    unit = max(errors, key=lambda unit: errors[unit])
    return f"{errors[unit]:.2%} ({unit})"


def search_formats(
    traced: Callable[[Tree, GradientTransformation], Trace],
    params: Tree,
    tx: GradientTransformation,
    cluster: str | Cluster,
    *,
    state: Any,
    wires: Sequence[Wire] = (),
    moments: Sequence[Place] = (),
    where: Callable[[str, Any], bool] | None = None,
    grads: Tree = None,
    **more: Any,
) -> FormatsFound:
    """Searches the fastest schedule that fits, whole and with each of `wires`, each of `moments` and both together,
    beside what the formats lose of the values of `state`. Every rank must call it, if `state` is sharded.

    traced: the step's trace for such parameters and such an optimizer: a function around `ya.planner.trace`
    params: as `ya.init` takes them; where: leaves that travel in `wires`, as `ya.params.with_wire` takes it
    moments: formats, as `ya.optim.in_format` takes them, or "host", as `ya.optim.on_host`
    state: whose weights and moments are measured; None: nothing is. grads: gradients to measure, of `ya.grad` say
    more: of `search`: memory, stages

    Raises DoesNotFit where nothing fits.

    >>> def traced(params, tx):
    ...     return ya.planner.trace(loss_fn, params, batch, tx=tx, ranks=16)
    >>> asked = {"wires": [ya.Wire(gather=ya.formats.Scaled())], "moments": [ya.formats.Roots(), "host"]}
    >>> found = ya.planner.search_formats(traced, params, tx, "a100-80g", **asked, state=state, memory=2**30)
    >>> len(found.choices), found.best.found.best.step_s <= found.choices[0].found.best.step_s
    (6, True)
    """
    choices: list[FormatChoice] = []
    refused: DoesNotFit | None = None
    of_places = [(place, _moved(tx, place), _moment_errors(place, state)) for place in (None, *moments)]
    for wire in (WHOLE, *wires):
        light = params if wire == WHOLE else with_wire(params, wire, where)
        of_wire = {} if wire == WHOLE else _wire_errors(wire, light, state, grads)
        for place, placed, of_moments in of_places:
            found = None
            try:
                found = search(traced(light, placed), cluster, **more)
            except DoesNotFit as error:
                refused = error
            choices.append(FormatChoice(wire, place, light, placed, found, of_wire | of_moments))
    if refused is not None and not any(choice.found for choice in choices):
        raise refused
    return FormatsFound(tuple(choices))


def _moved(tx: GradientTransformation, place: Place | None) -> GradientTransformation:
    if place is None:
        return tx
    return on_host(tx) if place == "host" else in_format(tx, place)


def _moment_errors(place: Place | None, state: Any) -> Errors:
    if state is None or not isinstance(place, Format):
        return {}
    return {"moments": relative_errors(place, state.opt_state)}


def _wire_errors(wire: Wire, light: Tree, state: Any, grads: Tree) -> Errors:
    """Measures the leaves that are in `wire` in `light`."""
    chosen = {path for path, leaf in named_leaves(light) if getattr(leaf, "wire", WHOLE) == wire}
    found: Errors = {}
    for of, format, tree in ("weights", wire.gather, state and state.params), ("gradients", wire.reduce, grads):
        if format is not None and tree is not None:
            found[of] = relative_errors(format, tree, lambda path, _: path in chosen)
    return found
