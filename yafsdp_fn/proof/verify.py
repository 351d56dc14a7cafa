"""Proves that a program is right: executes it symbolically, with the contents of every buffer (proof/execution.py).

`RULES` lists the rules: each has a name, a sentence, checks in a file of this folder, and a test of its name. One step
is enough, since by `carry` and `once` it ends in the state in which it began. docs/design.md has the argument.

Accepted pipelines compute exactly, too. By `match` a receive delivers the message of the matching send; by `flow` that
message is the one that its segment has made, and the compute that needs it takes it. By `calls` and `once` every
contribution of the step is reduced on the stage that has made it; by `shared` and `deadlock` the stages that share a
unit sum up their contributions, each of them once, at the same op.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from yafsdp_fn.program.program import Program, must_be_program
from yafsdp_fn.program.split import Message
from yafsdp_fn.proof import computes, form, gradients
from yafsdp_fn.proof.errors import Refused
from yafsdp_fn.proof.execution import Execution, Rule, by_moment
from yafsdp_fn.util.words import counted

# ---- The rules.


def _of_stages(name: str) -> Callable[[Program], None]:
    """Returns a check of stages.py, which is loaded when it is asked: the program of a plain step has one stage."""

    def check(program: Program) -> None:
        getattr(import_module("yafsdp_fn.proof.stages"), name)(program)

    return check


RULES = (
    # computes, and what they read
    Rule(
        "form",
        "ops name units, visits and slots that exist, with one slot for each unit, and no slot twice",
        form=form.check_form,
    ),
    Rule(
        "order",
        "the computes of a program are those of its trace, all of them, in the same order",
        forward=computes.in_order,
        backward=computes.in_order,
        end=computes.all_there,
    ),
    Rule(
        "weights",
        "a compute reads slots that hold its units' weights of this step",
        read=computes.of_this_step,
        last=computes.written,
    ),
    Rule(
        "carry",
        "a slot that is read before the program gathers into it holds the same unit, with the next step's weights, "
        "when the program ends",
        last=computes.carried_over,
    ),
    Rule(
        "secondary",
        "a secondary shard is stashed from a slot that holds the unit; a gather inside the node reads one that was "
        "stashed in this step, before the unit's update",
        gather=computes.stashed,
        stash=computes.from_its_slot,
    ),
    Rule(
        "graph",
        "a kept graph's backward runs in the slots of its forward (saved weights are views of them)",
        resume=computes.same_slots,
    ),
    # carry slots
    Rule(
        "offload",
        "a carry that a visit saves is in one place until its backward: a carry slot that was free, or the host; the "
        "backward finds it in its carry slot",
        save=computes.one_microbatch,
        load=computes.saved,
        take=computes.only(int, computes.is_there),
        put=computes.only(int, computes.is_free),
        fetch=computes.on_the_host,
        end=computes.all_read,
    ),
    Rule(
        "flow",
        "a message between segments of a pipeline is in one carry slot at a time: from the compute that gives it, "
        "over a send and a receive if they are on two stages, to the compute that takes it",
        crosses=computes.a_slot_each,
        take=computes.only(Message, computes.is_there),
        put=computes.only(Message, computes.is_free),
        send=computes.ends_here,
        receive=computes.ends_here,
        end=computes.all_taken,
    ),
    # gradients
    Rule(
        "gradient",
        "a backward writes to a gradient slot that is free or holds the same unit",
        write=gradients.is_free,
    ),
    Rule(
        "early",
        "a forward begins gradients only if it keeps its graph, and its backward comes next and writes to the same "
        "gradient slots, which are free",
        begin=gradients.own_backward_is_next,
    ),
    Rule(
        "reduce",
        "a reduction takes the gradient of its unit from the slot that holds it",
        reduce=gradients.holds_gradient,
    ),
    Rule(
        "ordered",
        "on a deterministic mesh each microbatch reduces a unit once, with all of its gradient, in the order of "
        "microbatches",
        reduce=gradients.microbatches_apart,
    ),
    Rule(
        "once",
        "every contribution (visit, microbatch, unit) is reduced exactly once by the end",
        end=gradients.all_reduced,
    ),
    # sums over replicas and stages
    Rule(
        "replicas",
        "where there are replicas, each unit's complete gradient is summed over them exactly once (a sum before the "
        "first gradient of the step does not count, since that gradient overwrites it)",
        allreduce=gradients.once_over_replicas,
        end=gradients.never_over_replicas,
    ),
    Rule(
        "shared",
        "where several stages of a pipeline hold a unit, its complete gradient is summed over them exactly once, "
        "after the sum over replicas",
        allreduce=gradients.once_over_stages,
        end=gradients.never_over_stages,
    ),
    # the optimizer's step
    Rule(
        "update",
        "each trainable unit is updated exactly once, or none on any stage; after the norm; the parts of an update "
        "are in order, with an exchange between two",
        update=gradients.after_the_norm,
        exchange=gradients.between_parts,
        end=gradients.all_updated,
        proved=_of_stages("all_or_none_update"),
    ),
    Rule(
        "norm",
        "the norm is taken at most once, and only for updates: of all trainable units, after the last compute, when "
        "their gradients are complete",
        norm=gradients.whole_norm,
        end=gradients.norm_is_read,
    ),
    # pipelines
    Rule(
        "stages",
        "every stage of the step has its ops, and units are shared as the cut says",
        pipeline=_of_stages("a_program_each"),
    ),
    Rule(
        "calls",
        "each segment runs on its stage once forward and once backward in every microbatch, visit by visit",
        in_form=_of_stages("once_each_way"),
    ),
    Rule(
        "match",
        "any two stages send and receive the same messages in the same order",
        proved=_of_stages("sent_is_received"),
    ),
    Rule(
        "deadlock",
        "all programs end, even if a send waits for its receive, and the host blocks before each op that is not a "
        "message",
        proved=_of_stages("all_end"),
    ),
)
"""All rules, in the order in which those are asked that look at the same moment."""

_CHECKS = by_moment(RULES)
_SENTENCES = {rule.name: rule.sentence for rule in RULES}


# ---- The verb.


def verify(program: Program) -> Program:
    """Returns the program if it is right; raises `Refused`, which names stage, op, buffer, rule and both uses, if not.
    A note of it has the rule's sentence.

    >>> ya.verify(program) == program
    True
    >>> ya.verify(program.with_ops(program.ops[1:]))           # without the gather of the embedding
    Traceback (most recent call last):
        ...
    yafsdp_fn.proof.errors.Refused: op 1 (forward embed in slot 2, keep graph): rule 'weights': slot 2 holds ...
    """
    must_be_program(program, "verify")
    if program._proved:
        return program
    # each stage by itself, and all together
    try:
        if len(program.stages) == 1 and program.by_stage[0] is program:
            _ask("form", program)
            Execution(program, _CHECKS).run()
        else:
            _verify_stages(program)
    except Refused as refused:
        refused.add_note(f"rule {refused.rule!r} says: {_SENTENCES[refused.rule]}")
        raise
    object.__setattr__(program, "_proved", f"; proved: {counted(len(program), 'op')}, {len(RULES)} rules")
    return program


def _verify_stages(program: Program) -> None:
    """Proves each stage by itself, and all together."""
    _ask("pipeline", program)
    for stage, ops in enumerate(program.stages):
        with _named(stage):
            _ask("form", Program(program.trace, ops))
    _ask("in_form", program)
    for stage, part in enumerate(program.by_stage):  # whose form follows: all of its computes are on their own stage
        with _named(stage):
            Execution(part, _CHECKS).run()
    _ask("proved", program)


@contextmanager
def _named(stage: int) -> Iterator[None]:
    """Names the stage in refusals."""
    try:
        yield
    except Refused as refused:
        raise Refused(refused.rule, refused.op, f"stage {stage}: {refused}", stage) from None


def _ask(moment: str, what: Program) -> None:
    """Asks the rules of a moment of whole programs."""
    for _, check in _CHECKS[moment]:
        check(what)
