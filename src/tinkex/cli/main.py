"""The entry point of the `tinkex` command."""

import io
import os
import sys

#: Set by the completion scripts of shells.
COMPLETE_VAR = "_TINKEX_COMPLETE"
#: The exit status that shells expect after Ctrl-C.
INTERRUPTED = 130


def main() -> None:
    """Run the command line; expected errors are shown as a message and a hint."""
    if sys.platform == "win32" and "PYTHONIOENCODING" not in os.environ:
        # Files and pipes have the code page of Windows otherwise, which lacks what models write.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8")
    try:
        import click

        from tinkex.cli.command_group import command
        from tinkex.cli.errors import ReaderGone
    except ModuleNotFoundError as error:
        # click and rich are optional: the client library does not need them.
        print(
            f"error: the tinkex command needs {error.name}, which is not installed.\n"
            "hint: pip install 'tinkex[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    if COMPLETE_VAR in os.environ:
        import tinkex.cli.completion  # noqa: F401 (registers the completion for bash)
    status: object = 0
    try:
        status = command.main(prog_name="tinkex", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.Abort as error:
        print("Stopped.", file=sys.stderr)
        status = INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        status = INTERRUPTED
    except SystemExit as exit:
        status = exit.code
    try:
        sys.stdout.flush()  # the reader may be gone only now
    except BrokenPipeError:
        ReaderGone().show()
        status = ReaderGone.exit_code
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
