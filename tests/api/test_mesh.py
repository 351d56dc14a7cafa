"""The axes of a mesh: what `ya.mesh` makes of a number of ranks, and which meshes a state takes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import yafsdp_fn as ya
from tests.harness.pool import on_ranks
from tests.harness.small import one_rank
from yafsdp_fn.communication.communicators import communicators
from yafsdp_fn.communication.groups import MeshRanks, device_of
from yafsdp_fn.util.mesh_axes import mesh_sizes


def test_without_torchrun_there_is_one_rank() -> None:
    mesh = one_rank()
    assert mesh.size() == 1
    assert mesh.mesh_dim_names == ("shard",)
    assert mesh.get_local_rank() == 0
    assert device_of(mesh) == torch.device("cpu")
    again = ya.mesh(device="cpu", shard=1)
    assert again.size() == 1
    assert again == mesh


def _size_under_srun() -> int:
    for name in ("WORLD_SIZE", "RANK"):
        del os.environ[name]
    os.environ["SLURM_STEP_NUM_TASKS"] = "2"
    with pytest.warns(UserWarning, match=r"by SLURM_STEP_NUM_TASKS there are several processes, .* trains alone"):
        return ya.mesh(device="cpu").size()


def test_processes_of_another_launcher_without_ranks_are_told_that_each_is_alone() -> None:
    assert ya.launch(_size_under_srun, ranks=2) == [1, 1]


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "expected"),
    [
        (1, -1, 6, (1, 6)),
        (1, 6, 6, (1, 6)),
        (2, -1, 6, (2, 3)),
        (-1, 2, 6, (3, 2)),
        (-1, 1, 6, (6, 1)),
        (6, -1, 6, (6, 1)),
        (2, 3, 6, (2, 3)),
        (-1, 6, 6, (1, 6)),
    ],
)
def test_sizes_follow_from_the_number_of_ranks(
    replicate: int, shard: int, world: int, expected: tuple[int, int]
) -> None:
    sizes = mesh_sizes(world, {}, replicate=replicate, shard=shard)
    assert (sizes["replicate"], sizes["shard"]) == expected


@pytest.mark.parametrize(
    ("replicate", "shard", "world", "text"),
    [
        (1, 3, 1, r"mesh\(shard=3\): the job has 1 rank; start 3 of them .*--nproc-per-node 3.*or leave shard=-1"),
        (2, 3, 8, r"mesh\(replicate=2, shard=3\): the job has 8 ranks; start 6 of them"),
        (3, -1, 8, r"mesh\(replicate=3, shard=-1\): the job has 8 ranks, not a multiple of 3; start 9 .* divisor of 8"),
        (-1, 3, 8, r"mesh\(replicate=-1, shard=3\): the job has 8 ranks, not a multiple of 3"),
        (
            -1,
            -1,
            8,
            r"at most one of them can follow from the number of ranks; for plain data parallelism give shard=1",
        ),
        (0, -1, 8, r"mesh\(replicate=0, shard=-1\): sizes are positive, or -1"),
        (1, -2, 8, r"mesh\(shard=-2\): sizes are positive, or -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_advice(replicate: int, shard: int, world: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        mesh_sizes(world, {}, replicate=replicate, shard=shard)


def test_arguments_that_do_not_fit_one_rank() -> None:
    one_rank()
    with pytest.raises(ValueError, match=r"mesh\(shard=3\): the job has 1 rank"):
        ya.mesh(shard=3, device="cpu")
    with pytest.raises(ValueError, match=r"mesh\(device=.*\): expected cuda or cpu"):
        ya.mesh(device="mps")
    with pytest.raises(
        ValueError, match=r"mesh\(local=2\): a copy of the state is cut over 1 ranks, not a multiple of 2"
    ):
        ya.mesh(local=2, device="cpu")


@pytest.mark.parametrize("timeout", [5, timedelta(0)])
def test_a_timeout_is_some_time(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a datetime\.timedelta, such as"):
        ya.mesh(device="cpu", timeout=timeout)


def test_a_timeout_comes_too_late_for_an_existing_group() -> None:
    one_rank()
    with pytest.raises(ValueError, match="the process group exists already"):
        ya.mesh(device="cpu", timeout=timedelta(seconds=1))


def test_meshes_with_other_axes_are_refused_by_name() -> None:
    one_rank()

    def refused(names: tuple[str, ...] | None, text: str) -> None:
        with pytest.raises(TypeError, match=text):
            ya.init({"a": ya.Param((3,))}, ya.optim.sgd(0.1), mesh=_named(names))

    refused(("dp", "tp"), r"got axes \('dp', 'tp'\) of sizes \(1, 1\); take the dimensions to shard over")
    refused(("shard", "replicate"), r"or axes \('replicate', 'shard'\) or \('node', 'local'\) or .* got axes \('shard'")
    refused(("replicate", "local", "node"), "got axes")
    refused(("replicate",), r"its axis is called 'replicate'; for copies alone give axes \('replicate', 'shard'\)")
    with pytest.raises(TypeError, match=r"got axes without names of sizes \(1, 1\)"):
        MeshRanks(init_device_mesh("cpu", (1, 1)))
    with pytest.raises(TypeError, match=r"mesh: expected a DeviceMesh, as ya.mesh\(\) makes, got str"):
        ya.init({"a": ya.Param((3,))}, ya.optim.sgd(0.1), mesh="cpu")


def _named(names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * len(names or ()), mesh_dim_names=names)


@pytest.mark.parametrize("names", [("dp",), ("replicate", "shard"), ("node", "local"), ("replicate", "node", "local")])
def test_one_rank_under_any_axes_is_alone(names: tuple[str, ...]) -> None:
    one_rank()
    comms = communicators(_named(names))
    assert comms.alone
    assert (comms.world, comms.ranks, comms.replicas, comms.nodes, comms.local_ranks) == (1, 1, 1, 1, 1)
    assert (comms.rank, comms.world_rank, comms.replica, comms.local_rank, comms.streams) == (0, 0, 0, 0, {})


@on_ranks(4)
def test_replicas_have_a_stream_of_their_own(_: Any) -> None:
    """Who is who on meshes is seen in tests/communication/test_reduce.py, by what each rank gets of sums."""
    for replicas, streams in ((1, 2), (2, 3)):
        comms = communicators(ya.mesh(device="cpu", replicate=replicas))
        assert len(comms.streams) == streams
        assert ("replicate" in comms.streams) == (replicas > 1)


@on_ranks(4)
def test_ranks_ascend(_: Any) -> None:
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"^mesh: ranks must ascend along its axes, got \[\[1, 0\], \[3, 2\]\]"):
        communicators(mesh)


@on_ranks(4)
def test_a_slice_of_a_larger_mesh(mesh: Any) -> None:
    """Two pairs of ranks that share nothing, each a mesh of its own: a slice of a larger mesh."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "dp"))
    part = whole["dp"]  # which owns its communicators
    comms = communicators(part)
    assert (comms.world, comms.replicas) == (2, 1)
    rank = mesh.get_local_rank()
    assert comms.all_reduce_sum(torch.tensor([float(rank)])).tolist() == [1.0 if rank < 2 else 5.0]


@on_ranks(2)
def test_ranks_that_ask_for_different_meshes_are_told_so(mesh: Any) -> None:
    text = r"^mesh: .* local= differs:\n +rank 0: 1\n +rank 1: 2\ncall ya.mesh with the same"
    with pytest.raises(ValueError, match=text):
        ya.mesh(local=1 + mesh.get_local_rank())


def test_a_deterministic_mesh_of_gpus_wants_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank()  # with a process group, so that none of NCCL is made
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"deterministic=2\): on GPUs .* call torch.use_deterministic_algorithms"):
        ya.mesh(device="cuda", deterministic=2)
