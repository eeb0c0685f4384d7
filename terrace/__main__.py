"""The command `terrace`, and `python -m terrace`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script. Ctrl-C is no error while the command line is still being imported either."""
    try:
        from terrace.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
