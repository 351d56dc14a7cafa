"""The schedule is data: what is visited (trace), what is executed (program), who waits (scoreboard), and the proof.

    schedule = zero3(resident=2)       # a factory returns a function
    program = schedule(trace)          # from a trace to a program
    verify(program); print(program)

Any function from a trace to a program is a schedule. `__init__.pyi` lists the public names, each with the module that
has it. A name is imported at its first use: pipelines and other libraries' schedules stand on what is here.
"""

from typing import Any

from yafsdp_fn.schedules.build import build as build  # at once: else the name would be its file's
from yafsdp_fn.util.late_names import homes_of, imported

_HOMES = homes_of(__file__)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__
