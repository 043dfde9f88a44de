"""HTTP: typed calls, retries, long polls, limits."""
