"""The server: accepts and stores requests, runs them on engines in order, returns the results."""
