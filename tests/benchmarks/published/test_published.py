"""The published table: peers' programs, and the preset fitted to it; runs of other frameworks."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import yafsdp_fn as ya
from benchmarks.published import main, runs, steps, yafsdp
from benchmarks.published.errors import by_groups
from benchmarks.published.yafsdp import Row, predicted, rows, summary, traced
from models import llama
from tests.harness.abstract import step_of
from yafsdp_fn.lab import peers
from yafsdp_fn.lab.peers import Copy
from yafsdp_fn.planner import Plan, min_ckpt_layers, simulate, trace
from yafsdp_fn.planner.cluster import A100
from yafsdp_fn.schedules import AllReduce, Backward, Forward, Gather, Program, Reduce, Schedule, Trace, verify

TABLE = rows()
PEERS = {"yafsdp": peers.yafsdp, "fsdp": peers.fsdp, "fsdp2": peers.fsdp2}
L, U, RANKS = 5, 2, 16
FLAT = (("shard", RANKS),)
CONFIG = llama.Config(vocab=512, embed=64, ffn=128, layers=L, heads=4, kv_heads=4, head_dim=16, max_length=64)


def traced_small(mesh: object = FLAT, microbatches: int = 1, **precision: torch.dtype) -> Trace:
    return trace(
        *step_of(CONFIG, microbatches),
        mesh=mesh,
        precision=ya.Precision(compute=torch.bfloat16, **precision),
        microbatches=microbatches,
        tx=ya.optim.adamw(1e-3),
    )


def without_copies(program: Program) -> Program:
    return Program(program.trace, tuple(op for op in program.ops if not isinstance(op, Copy)))


def copies(program: Program, stream: str) -> list[Copy]:
    return [op for op in program.ops if isinstance(op, Copy) and op.stream == stream and op.nbytes]


# ---- peers


@pytest.mark.sampled
@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mesh", [FLAT, (("replicate", 2), ("shard", 8))], ids=["shards", "replicas"])
@pytest.mark.parametrize("remat", ["none", "first:2"])
def test_without_copies_a_peer_is_a_correct_program(
    peer: Callable[..., Schedule], microbatches: int, mesh: object, remat: str
) -> None:
    program = peer(remat=remat)(traced_small(mesh, microbatches))
    verify(without_copies(program))
    assert program.count(Reduce) == microbatches * (L + U)
    assert program.count(AllReduce) == (0 if mesh == FLAT else L + U)
    again = [op for op in program.ops if isinstance(op, Forward) and not op.keep]
    assert len(again) == microbatches * (0 if remat == "none" else 2)


@pytest.mark.parametrize("peer", [peers.fsdp, peers.fsdp2])
def test_fsdp_gathers_layers_twice_and_the_rest_once(peer: Callable[..., Schedule]) -> None:
    program = peer()(traced_small())
    assert program.count(Gather) == 2 * L + U
    first, *_, last = (op for op in program.ops if isinstance(op, Gather | Reduce))
    assert [program.trace.units[unit].name for unit in first.units] == ["embed", "head"]
    assert first.units == last.units
    order = [op for op in program.ops if isinstance(op, Gather | Reduce | Backward)][L + 1 :]
    assert [type(op).__name__ for op in order[:8]] == [
        "Gather",
        "Backward",
        "Gather",
        "Backward",
        "Reduce",
        "Gather",
        "Backward",
        "Reduce",
    ]  # head; then each layer, with the next one gathered in front of its backward


def test_copies_are_printed_and_refused() -> None:
    program = peers.fsdp2()(traced_small())
    assert re.search(r"copy layers\[0\]\n", str(program))
    assert "Copy(" not in str(program)
    with pytest.raises(ya.errors.Refused, match=r"a peer's copy, which simulate and Plan\.of take"):
        verify(program)


def test_yafsdp_has_two_slots_for_everything() -> None:
    program = peers.yafsdp()(traced_small())
    assert set(program.slot_bytes()) == set(program.grad_slot_bytes()) == {0, 1}
    assert program.count(Gather) == 2 * (L + U) - 2  # the last two are still in their slots


def test_yafsdp_of_a_tied_head_gives_each_unit_of_a_visit_its_own_slot() -> None:
    config = llama.Config(**{**vars(CONFIG), "tied": True})
    verify(without_copies(peers.yafsdp()(trace(*step_of(config, 1), ranks=2))))


@pytest.mark.parametrize(
    ("peer", "reduce", "on_compute", "on_reduce"),
    [
        (peers.yafsdp(), torch.float32, 4, 6),
        (peers.yafsdp(), torch.bfloat16, 4, 0),
        (peers.fsdp(growth=0.0), torch.float32, 4, 14),
        (peers.fsdp(growth=0.0), torch.bfloat16, 4, 4),
        (peers.fsdp2(), torch.float32, None, 0),
    ],
)
def test_copies_per_element(peer: Schedule, reduce: torch.dtype, on_compute: int | None, on_reduce: int) -> None:
    program = peer(traced_small(reduce=reduce))
    elements = sum(unit.numel for unit in program.trace.units)
    layers = sum(unit.numel for unit in program.trace.units if unit.stack)
    # fsdp2 copies gradients in, 2 + 4, and what it gathers out, 4: layers twice, the rest once
    expected = 10 * elements + 4 * layers if on_compute is None else on_compute * elements
    assert sum(copy.nbytes for copy in copies(program, "compute")) == pytest.approx(expected, rel=1e-3)  # padding
    assert sum(copy.nbytes for copy in copies(program, "reduce")) == pytest.approx(on_reduce * elements, rel=1e-3)


def test_growth_is_quadratic_in_the_unit() -> None:
    trace = traced_small()
    more, none = (copies(peers.fsdp(growth=g)(trace), "reduce") for g in (7.0, 0.0))
    for one, other in zip(more, none, strict=True):
        numel = sum(trace.units[unit].numel for unit in one.units)
        assert one.nbytes - other.nbytes == pytest.approx(7.0 * numel**2 / 1e9)


@pytest.mark.sampled
@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
@pytest.mark.parametrize("slow", ["network", "compute"])
def test_one_communicator_runs_one_collective_at_a_time_in_order(peer: Callable[..., Schedule], slow: str) -> None:
    cluster = A100.replace(**({"network_bandwidth": 1e6} if slow == "network" else {"matmul_flops": 1e9}))
    timeline = simulate(peer()(traced_small()), cluster)
    spans = [span for span in timeline.spans if isinstance(span.op, Gather | Reduce)]
    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))
    assert {span.stream for span in spans} == {"gather", "reduce"}


# ---- the table


@pytest.mark.nightly
def test_the_preset_as_run_explains_the_table() -> None:
    (ours, ours_most), (theirs, theirs_most), (speedup, speedup_most) = summary([predicted(row) for row in TABLE])
    assert ours <= 1.5
    assert ours_most <= 7
    assert theirs <= 3
    assert theirs_most <= 9
    assert speedup <= 2
    assert speedup_most <= 5


@pytest.mark.nightly
def test_published_numbers_of_recomputed_layers_follow_from_one_budget() -> None:
    """With the bf16 gradient of a product that those runs cast afterwards, as a GPU of today need not."""
    for row in TABLE:
        trace = traced(row)
        gradient = max(visit.cost.scratch_bytes for visit in trace.visits)
        least = min_ckpt_layers(trace, A100.memory_bytes - gradient, peers.yafsdp)
        assert least is not None and math.ceil(least / 5) * 5 == row.ckpt_layers, row


def test_the_table_is_the_published_one() -> None:
    assert len(TABLE) == len(set(TABLE)) == 11
    assert TABLE[0] == Row("llama2-7b", 64, 2048, 0, 0.81, 0.90)
    assert TABLE[0].speedup == pytest.approx(0.1)


def test_unknown_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, said in (
        (["now"], "now"),
        (["--sources", "--rows", "rows.csv"], "--rows, --sources: one of them"),
        (["--json"], "--json goes with --rows or --sources"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yafsdp, "rows", lambda: TABLE[:1])
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("llama2-7b, 64 GPUs, 2048, 0 recomputed")
    assert "0.81" in lines[2]


# ---- runs of other frameworks


def test_runs_of_others_are_read_or_refused_by_line() -> None:
    found, refused = runs.table()
    assert len(found) > 140
    assert len(refused) > 50
    assert all(run.gpus >= 1 and run.config.layers >= 1 for run in found)
    (said,) = (each for each in refused if "line 225:" in each)
    assert "tensor, context or expert parallelism" in said


def test_a_run_of_others_is_predicted_near_what_was_measured() -> None:
    """Of FSDP2 on eight GPUs: the planner as it is, fitted to none of these rows."""
    known = [run for run in runs.table()[0] if run.measured_s and (run.gpus, run.framework) == (8, "fsdp2")]
    found = steps.predict(known[0])
    assert found.error is not None and -50 < found.error < 100, found
    assert found.peak_bytes > 0


LINE = {"model": "Llama 3 8B", "gpus": "8", "gpu": "H100 80GB", "parallelism": "FSDP", "seq_len": "8192"}
LINE |= {"microbatch_per_gpu": "1", "precision": "bf16", "framework": "fsdp1", "recompute": "none"}


def read(**fields: str) -> runs.Run:
    return runs.read({**LINE, **fields}, "rows.csv, line 2")


def refused(text: str, **fields: str) -> None:
    with pytest.raises(runs.Refused, match=text):
        read(**fields)


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("A100 SXM4 80GB", "A100"),
        ("8xH100", "H100"),
        ("NVIDIA H200", "H200"),
        ("b200 180GB", "B200"),
        ("MI300X (192 GB)", "MI300X"),
    ],
)
def test_a_gpu_is_known_by_whole_words(gpu: str, kind: str) -> None:
    assert read(gpu=gpu).gpu == kind
    for other in ("GB200 NVL72", "GH200 96GB", "GB300"):
        refused(f"no figures for a GPU of kind '{other}'", gpu=other)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("NousResearch/Llama-2-70b-hf", "llama2-70b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("Llama 3 8B (GQA)", "llama3-8b"),
        ("llama3_8b", "llama3-8b"),
        ("Llama-3.2-1B", "llama3.2-1b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen 3 8B", "qwen3-8b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
    ],
)
def test_a_model_is_known_by_its_name_on_the_hub(model: str, name: str) -> None:
    assert read(model=model).name == name


def test_orders_of_pipelines_and_numbers_are_read_however_they_are_spelt() -> None:
    staged = {"parallelism": "PP8", "model": "Llama 2 7B", "microbatches": "16 (two a stage)"}
    orders = {"ZB-V": "v_shaped", "ZBV (torch)": "v_shaped", "zb 1p": "zero_bubble", "1F1B, own": "one_f_one_b"}
    orders |= {"ZB_2P": "zero_bubble_2p", "1F1B interleaved vpp2": "interleaved", "GPipe": "gpipe"}
    assert {name: read(**staged, schedule=name).order for name in orders} == orders
    refused("pipeline schedule 'interleaved zb' is not modelled", **staged, schedule="Interleaved ZB")
    run = read(gpus="1,024 (128 nodes)", seq_len="8192 (packed)", step_s="1.25 (1.2 to 1.3)", global_batch_seqs="2,048")
    assert (run.gpus, run.seq_len, run.accumulation, run.measured_s) == (1024, 8192, 2, 1.25)
    for column, value in (("gpus", "eight"), ("microbatches", "2.5"), ("step_s", "1.2 to 1.3"), ("layers", "-3")):
        refused(
            f"rows.csv, line 2: .*{column} is '{value}', expected a ",
            **{column: value, "model": "gpt-x"} if column == "layers" else {column: value},
        )


def small(**fields: str) -> runs.Run:
    return read(**{"model": "Llama 3.2 1B", "seq_len": "512", "gpus": "16", "microbatch_per_gpu": "8", **fields})


@pytest.mark.parametrize("staged", [{}, {"parallelism": "PP2", "schedule": "1F1B", "gpus": "8"}], ids=["one", "two"])
def test_a_step_of_many_microbatches_is_as_a_full_simulation_says(staged: dict[str, str]) -> None:
    run = small(microbatches="7", **staged)
    cluster = steps.cluster_of(run)
    assert steps.seconds(run, cluster) == pytest.approx(simulate(steps.program(run, 7), cluster).seconds, rel=2e-3)


def test_recomputation_and_fp8_cost_what_they_should() -> None:
    plain, again, fp8 = (
        steps.predict(run).tokens_per_s
        for run in (small(gpus="1"), small(gpus="1", recompute="all"), small(gpus="1", precision="fp8"))
    )
    assert 0.65 * plain < again < 0.9 * plain
    assert plain < fp8 < 2 * plain


def test_a_plan_says_how_much_of_it_nothing_explains() -> None:
    program = steps.program(small(), 1)
    doubtful, plain = (str(Plan.of(program, cluster)) for cluster in (peers.AS_RUN, A100))
    assert re.search(r"bound by \w+ and, for \d+% of the step, by an overhead that nothing explains", doubtful)
    assert re.search(r"bound by \w+; ", plain)


def test_errors_are_summed_up_by_kind_and_number_of_gpus() -> None:
    listed = [small(gpus=gpus) for gpus in ("16", "16", "128")]
    errors = [(steps.Predicted(run, 1.0, 1), error) for run, error in zip(listed, (-10.0, 20.0, -1.0), strict=True)]
    found = by_groups(errors)
    assert list(found["gpus"]) == ["512", "64"]
    assert found["gpus"]["64"] == {"rows": 2, "median": 15.0, "p90": 19.0, "largest": 20.0, "bias": 5.0}
    assert found["all"]["all"]["median"] == 10.0


def test_a_file_of_another_encoding_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(runs.TABLE.read_bytes().replace(b"H100", b"\xe9", 1))
    with pytest.raises(ValueError, match=r"rows\.csv: 'utf-8' codec can't decode"):
        runs.table(file)
    assert main(["--rows", str(file)]) == 2
    assert "rows.csv" in capsys.readouterr().err


def test_memory_is_of_the_unit_that_is_said() -> None:
    units = {"GiB max allocated": 2.0**30, "MiB peak": 2.0**20, "GB": 1e9, "TB": 1e12, "MB peak": 1e6}
    found = {kind: read(memory="70.5", memory_unit_kind=kind).measured_bytes for kind in units}
    assert found == {kind: 70.5 * unit for kind, unit in units.items()}
    assert read(memory="71,300 MiB (worst rank)").measured_bytes == 71_300 * 2**20
    assert read(memory="OOM").measured_bytes == math.inf
    assert read(memory="-").measured_bytes is None
    refused(
        "memory is '88' of unit '% of a card', expected one such as GiB or GB",
        memory="88",
        memory_unit_kind="% of a card",
    )


def test_recomputation_that_is_not_stated_is_what_fits() -> None:
    """A run whose tensors are beyond the card did not run so."""
    for said, batch, recompute in (("", "1", "none"), ("", "16", "all"), ("none", "16", "none")):
        found = steps.predict(read(model="Llama 2 7B", microbatch_per_gpu=batch, recompute=said, seq_len="2048"))
        assert (found.run.recompute, found.fits) == (recompute, said == ""), found
    with pytest.raises(
        runs.Refused, match=r"rows.csv, line 2: .*not stated, and with all of it the run needs [\d,]+ GiB"
    ):
        steps.predict(read(microbatch_per_gpu="2048", recompute=""))


def test_stages_that_go_on_apart_are_as_fast_as_the_slowest_of_them() -> None:
    """Zero Bubble's optimizer with post-validation: no stage waits for the others' norm."""
    found = {run.apart: run for run in runs.table()[0] if run.order == "zero_bubble_2p" and run.accumulation == 24}
    apart = found[True]
    joint = found[False]
    cluster = steps.cluster_of(apart)
    assert apart.at != joint.at
    assert joint.apart is False
    assert steps.seconds(apart, cluster) < steps.seconds(apart._replace(apart=False), cluster)


def test_rows_in_json_say_how_far_off_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = {"model": "Llama 3.2 1B", "seq_len": "512", "recompute": "all", "memory": "OOM", "step_s": "0.25"}
    head = ",".join({**LINE, **few})
    line = ",".join({**LINE, **few}.values())
    file = tmp_path / "rows.csv"
    file.write_text(f"{head},file\n{line},mine.csv\n")
    assert main(["--rows", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert row["error"] == pytest.approx(100 * (0.25 / row["seconds"] - 1), abs=0.01)
    assert (row["file"], row["at"], row["measured_bytes"]) == ("mine", "rows.csv, line 2", None)
    assert row["ran_out"]
    assert row["fits"]
    assert row["predicted_peak_bytes"] > 0


def the_run(**fields: object) -> runs.Run:
    return next(run for run in runs.table()[0] if run.measured_s and run._asdict().items() >= fields.items())


def test_what_frameworks_do_beside_their_schedule_is_counted() -> None:
    adapted = the_run(source="fms_acceleration_a100", gpus=1, trained="adapters", micro_batch=8, logits="float32")
    found = steps.predict(adapted)
    assert adapted.measured_bytes
    assert found.error is not None
    assert abs(found.error) < 5
    assert found.peak_bytes == pytest.approx(adapted.measured_bytes, rel=0.03)


def test_what_a_row_ran_is_in_its_columns_and_no_words_of_its_source_tell() -> None:
    said = {"kernels": "fused", "trained": "adapters", "recompute": "every 2nd", "fused_loss": "yes"}
    run = read(**said, replicas="2", reentrant="yes", file="torchtitan.csv", notes="Liger, Megatron, fms_acceleration")
    assert (run.kernels, run.trained, run.recompute, run.logits) == ("fused", "adapters", "every 2nd", "")
    assert (run.replicas, run.stops_early, run.apart, run.scores) == (2, False, False, False)
    plain = read()
    named = read(notes="Liger, Megatron, InternEvo, DeepSpeed, LoRA", file="zero-bubble, torchtitan.csv")
    assert named._replace(source=plain.source) == plain
    assert plain.kernels == "pieces"
    assert plain.logits == "float32"
    refused(r"its framework is not modelled; the column framework takes fsdp1, fsdp2, ", framework="zero3")
    refused(r"kernels is 'quick', expected one of pieces, eager, fused", kernels="quick")


def test_an_optimizer_of_several_kernels_moves_more_than_one() -> None:
    plain, slow = (read(optimizer=said, model="Llama 3.2 1B", seq_len="512") for said in ("", "foreach"))
    cluster = steps.cluster_of(plain)
    elements = plain.config.num_parameters / plain.gpus
    more = steps.seconds(slow, cluster) - steps.seconds(plain, cluster)
    assert more == pytest.approx(60 * elements / cluster.memory_bandwidth)  # 90 bytes each, and 30
    bf16 = slow._replace(param="bfloat16")
    less = steps.seconds(bf16, cluster) - steps.seconds(bf16._replace(foreach=False), cluster)
    assert less == pytest.approx(more / 4)
    refused("optimizer is 'quick', expected one of foreach", optimizer="quick")


def test_ethernet_is_congested_and_infiniband_is_not() -> None:
    far = the_run(source="internlm_zero1", gpus=1024)
    assert far.roce
    assert steps.cluster_of(far).congestion > 0
    assert not steps.cluster_of(the_run(source="torchtitan", gpus=128)).congestion


def test_nodes_are_as_large_as_a_row_says() -> None:
    four = the_run(source="kempner_h200", gpus=8)
    cluster = steps.cluster_of(four)
    assert four.per_node == 4
    assert cluster.gpus_per_node == 4
    assert cluster.network_bandwidth == steps.KINDS["H200"].network_bandwidth / 2
    refused("6 GPUs do not fill nodes of 4", gpus="6", gpus_per_node="4", gpu="A100")
