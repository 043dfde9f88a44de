"""Workers placed by Ray: which ones are wanted, the process of one, and the Ray cluster."""
