"""One process as a rank of a cluster: a torch.distributed backend whose collectives take the modelled time."""

from benchmarks.emulated.emulate import Emulation, emulate

__all__ = ["Emulation", "emulate"]
