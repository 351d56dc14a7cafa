"""What a refusal draws: the uses of the buffer that two ops want, aligned, with both ops marked."""

from __future__ import annotations

from tests.program.traces import model, on
from tests.proof.listed import begin, drop, move, put, refusal, replace
from tests.proof.test_verify import PLAIN, WHOLE
from yafsdp_fn.schedules import AllReduce, Gather, Receive, Refused, zero3


def drawing(refused: Refused) -> list[str]:
    """The lines below the first, without their columns."""
    return [" ".join(line.split()) for line in str(refused).splitlines()[1:]]


def test_a_slot_that_another_unit_has_taken_is_drawn() -> None:
    refused = refusal(put(Gather((1,), (0,)), "forward a[2]")(PLAIN))
    assert drawing(refused)[0] == "uses of slot 0:"
    assert drawing(refused)[-2:] == [
        "write op 8 gather a[0] -> slot 0 <- against this",
        "read op 9 forward a[2] in slot 0, keep graph <- refused",
    ]
    assert "write op 5 gather a[2] -> slot 0" in drawing(refused)  # what was lost
    columns = [line.index("op ") for line in str(refused).splitlines()[2:]]
    assert len(set(columns)) == 1  # aligned


def test_a_gradient_that_is_in_the_way_is_drawn() -> None:
    assert drawing(refusal(drop("reduce a[2]")(PLAIN))) == [
        "uses of grad slot 0:",
        "write op 12 backward a[2] in slot 0 -> grad slot 0 <- against this",
        "write op 16 backward a[0] in slot 0 -> grad slot 0 <- refused",
    ]


def test_a_gradient_that_is_left_is_drawn() -> None:
    assert drawing(refusal(drop("reduce a[0]")(PLAIN))) == [
        "uses of grad slot 0:",
        "read op 13 reduce a[2] <- grad slot 0",
        "write op 17 backward a[0] in slot 0 -> grad slot 0 <- against this",
    ]


def test_an_update_that_comes_too_early_is_drawn() -> None:
    """Nobody has taken the norm that it needs."""
    assert drawing(refusal(move("update embed", "backward a[1]")(WHOLE))) == [
        "uses of the norm:",
        "read op 16 update embed <- refused",
    ]


def test_a_sum_over_replicas_that_is_doubled_is_drawn() -> None:
    assert drawing(refusal(put(AllReduce((4,)), "backward a[2]")(WHOLE))) == [
        "uses of grad shard of head:",
        "write op 10 reduce head <- grad slot 3",
        "write op 11 all-reduce head <- against this",
        "write op 12 all-reduce head <- refused",
    ]


def test_a_stale_secondary_shard_is_drawn() -> None:
    assert drawing(refusal(replace("gather a[0] ->", Gather((1,), (0,), "node"))(WHOLE))) == [
        "uses of secondary shard of a[0]:",
        "write op 0 stash a[0] <- slot 0 <- against this",
        "read op 15 gather a[0] in node -> slot 0",
        "read op 29 gather a[0] in node -> slot 0 <- refused",
    ]


def test_a_message_without_stages_is_shown_as_it_is() -> None:
    refused = refusal(begin(Receive(0, 0))(PLAIN))
    assert refused.rule == "form"
    assert str(refused).startswith("op 0 (Receive(flow=0, ")
    assert str(refused).endswith("the trace has no pipeline stages")


def test_of_many_uses_the_middle_is_left_out() -> None:
    """Nine layers go through slot 0, and a[0], which the next step begins with, is gathered last, if it is."""
    trace = on(model(9), "ranks", "after norm")
    program = zero3(update=True)(trace)
    last = max(at for at, op in enumerate(program.ops) if op == Gather((1,), (0,)))
    lines = drawing(refusal(program.with_ops(op for at, op in enumerate(program.ops) if at != last)))
    assert len(lines) == 10
    assert lines[5] == "..."
    assert lines[1].endswith("<- refused")
    assert lines[-1].endswith("<- against this")
