"""What the package shows of itself."""

from __future__ import annotations

import yafsdp_fn as ya


def test_dir_shows_public_names_alone_and_each_is_there() -> None:
    shown = [name for name in dir(ya) if not (name.startswith("__") and name.endswith("__"))]
    assert sorted(shown) == sorted(ya.__all__) and not any(name.startswith("_") for name in shown)
    assert all(getattr(ya, name) is not None for name in shown)
