"""
An engine process: `python -m tinkex.engine` runs `engine.process`.

Its imports make 600,000 objects, and nearly all of them stay. Garbage collections would look at them
again and again: while they are made, which takes almost a second, and in each full collection later.
"""

import gc


def main() -> None:
    gc.disable()
    from tinkex.engine import process

    gc.freeze()
    gc.enable()
    process.main()


if __name__ == "__main__":
    main()
