"""
The tables of tinkex 0.1: the oldest ones that are upgraded.

Versions 0001 to 0007 were never released; tinkex 0.1 upgrades a database of one of them to 0008.
"""

revision = "0008"
down_revision = None


def upgrade() -> None:
    """Never called: a database of this version has its tables, and a new one gets newer ones."""
