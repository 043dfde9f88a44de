"""`python -m tinkex.cli` is the `tinkex` command."""

from tinkex.cli.main import main

if __name__ == "__main__":
    main()  # if click is missing, it says what to install
else:
    from tinkex.cli.command_group import command as cli

    __all__ = ["cli"]
