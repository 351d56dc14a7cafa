"""The start of a run that this process belongs to, in the words of torchrun, which `train launch` uses too.

TORCHELASTIC_RESTART_COUNT   starts before this one
TORCHELASTIC_MAX_RESTARTS    restarts that there may be
TORCHELASTIC_RUN_ID          the same for all of them; torchrun says "none" without --rdzv-id or --standalone
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

CANNOT_WORK = 2
"""Status of a subcommand that another attempt would not help: its settings, or a loss that diverges."""


class Attempt(NamedTuple):
    """A start of a run.

    number: starts before this one; most: restarts allowed; run_id: of all of them together, may be empty
    """

    number: int = 0
    most: int = 0
    run_id: str = ""

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Attempt:
        number, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
        return Attempt(int(number), int(most), "" if run_id == "none" else run_id)

    def environment(self) -> dict[str, str]:
        return {
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "TORCHELASTIC_MAX_RESTARTS": str(self.most),
            "TORCHELASTIC_RUN_ID": self.run_id or "none",
        }

    def restarts(self, earlier: str) -> bool:
        """Tells whether this start goes on with what one of run id `earlier` left.

        torchrun does not count a restart for ranks that joined or left; the run id tells then.
        """
        return self.number > 0 or (self.most > 0 and self.run_id != "" and self.run_id == earlier)
