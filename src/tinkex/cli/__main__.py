"""`python -m tinkex.cli` is the `tinkex` command."""

from tinkex.cli.main import main

if __name__ == "__main__":
    main()  # which says what to install where click is missing
else:
    from tinkex.cli.command_group import command as cli

    __all__ = ["cli"]
