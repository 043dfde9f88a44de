"""`tinkex worker`, with the same arguments, that loses every second notification."""

import sys

from server.cluster_parts import Forgetful
from tinkex.cli.main import main

if __name__ == "__main__":
    with Forgetful():
        sys.argv[1:1] = ["worker"]
        main()
