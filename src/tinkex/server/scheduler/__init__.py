"""The scheduler: chooses the next accepted request, runs it on an engine, stores its result."""
