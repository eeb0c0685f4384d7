"""`terrace`, with workers that send the opposite of what they compute.

`python cheating.py FILE train work URL ...` begins once the named pipe FILE is written to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from terrace.cli import run
from training.cheating import Cheater
from training.learner import FlatLearner


def main() -> int:
    """Returns the exit code of the command."""
    cheater, honest = Cheater("sign-flip", seed=0), FlatLearner.compute

    def compute(self: FlatLearner, *given: Any, **named: Any) -> Any:
        return cheater.sends(honest(self, *given, **named))

    replaced: Callable[..., Any] = compute
    FlatLearner.compute = replaced  # type: ignore[method-assign]  # the cheat
    Path(sys.argv[1]).read_bytes()
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
