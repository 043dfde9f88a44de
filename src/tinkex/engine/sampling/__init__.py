"""Sampling: request checks, scheduling over a paged KV cache, and token sampling."""
