"""Mirrors of the official client: import paths, resources, raw responses, request options."""
