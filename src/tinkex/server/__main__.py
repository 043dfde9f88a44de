"""
The web process: `python -m tinkex.server` runs `web_process`. Only the supervisor starts it.

Garbage collections leave out what its imports make, because nearly all of it stays.
"""

import gc


def main() -> None:
    gc.disable()
    from tinkex.server import web_process

    gc.freeze()
    gc.enable()
    web_process.main()


if __name__ == "__main__":
    main()
