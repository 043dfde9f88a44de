"""The scheduler: decides which accepted request runs next, runs it on an engine, and stores its result."""
