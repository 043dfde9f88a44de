"""The `tinkex` command. Loads a subcommand when it is called, so that `--help` stays quick."""

import sys


def main() -> None:
    """Run the command line; errors are a message and a hint, not a traceback."""
    try:
        from tinkex.cli.group import command
    except ModuleNotFoundError as error:
        # click and rich are extras: the client library does without them.
        print(
            f"error: the tinkex command needs {error.name}, which is not installed.\n"
            "hint: pip install 'tinkex[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
