"""Work on a data folder beside serving: cleanup, backup, diagnosis."""
