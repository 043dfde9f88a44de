"""`python -m tinkex.cli` is the `tinkex` command."""

from tinkex.cli.group import command as cli
from tinkex.cli.main import main

__all__ = ["cli"]

if __name__ == "__main__":
    main()
