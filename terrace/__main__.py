"""The command `terrace`, and `python -m terrace`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. Ctrl-C ends it without a traceback, even while the command line is being
    imported."""
    try:
        from terrace.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
