"""yafsdp_fn: sharded training of stacked models as functions, with the schedule as data.

`__init__.pyi` lists the public names, each with the module that has it. A name is imported at its first use, so that
`import yafsdp_fn` costs nothing, and programs are built, proved and simulated without torch (docs/playground).
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from yafsdp_fn.util.late_names import homes_of, imported

_HOMES = homes_of(__file__)
_MODULES = [name for name, home in _HOMES.items() if home == __name__]

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        try:
            return imported(__name__, _HOMES, name)
        except ModuleNotFoundError as error:
            without = f"without {error.name}, which is not installed"
            raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r} {without}") from error
    from yafsdp_fn.util.foreign_names import hint

    if found := hint(name):
        raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r}{found}")
    meant = [f"ya.{module}.{name}" for module in _MODULES if name in _public_names(module)]
    meant = meant or [f"ya.{near}" for near in get_close_matches(name, __all__, 1)]
    near = f"; did you mean {' or '.join(meant)}?" if meant else ""
    raise AttributeError(f"module 'yafsdp_fn' has no attribute {name!r}{near}")


def _public_names(module: str) -> Any:
    """Returns the public names of one of our modules; none if it needs what is not installed."""
    try:
        return getattr(import_module(f"{__name__}.{module}"), "__all__", ())
    except ModuleNotFoundError:
        return ()


def __dir__() -> list[str]:
    return __all__
