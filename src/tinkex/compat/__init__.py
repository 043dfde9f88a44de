"""Mirrors of the official client: import paths, raw responses, request options."""
