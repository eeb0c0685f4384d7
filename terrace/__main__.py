"""`python -m terrace`: the same as the command `terrace`."""

from terrace.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
