"""
The oldest tables that are upgraded. Versions 0001 to 0007 were never released.
"""

revision = "0008"
down_revision = None


def upgrade() -> None:
    """Never called: a database of this version has its tables, and a new one gets newer ones."""
