"""How often the web process looks for garbage: rarely, and never among what it was born with."""

import gc

# Most of what a request makes is freed by counting references. With Python's defaults (700 new
# objects) thousands of requests in flight are walked through again and again, for nothing.
NEW_OBJECTS = 50_000
YOUNG_ROUNDS = 20


def collect_rarely() -> None:
    """Call once, when everything that lives as long as the process has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, YOUNG_ROUNDS)
