"""The server: accepts requests, stores them, runs them on engines in order, and returns the results."""
