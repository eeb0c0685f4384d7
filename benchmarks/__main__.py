"""`python -m benchmarks NAME`: run a benchmark on the harness of the experiments."""

import sys

from benchmarks.catalog import BENCHMARKS
from terrace.cli import run
from terrace.commands.experiment import experiment_app

__all__ = ["app", "main"]

app = experiment_app(BENCHMARKS, "Compare Terrace with other programs, and with itself.")


def main() -> None:
    """Run the command line."""
    sys.exit(run(sys.argv[1:], app, "python -m benchmarks"))


if __name__ == "__main__":
    main()
