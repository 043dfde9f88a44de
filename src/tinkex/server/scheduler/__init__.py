"""Which accepted request runs next, on which engine, and what becomes of it."""
