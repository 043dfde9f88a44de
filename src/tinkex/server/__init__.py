"""The heavy half: accepts work, keeps it, has it done in order, and hands out the results."""
