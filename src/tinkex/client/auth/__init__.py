"""Credentials: API keys, key commands, tokens."""
