"""Sampling: scheduler, KV cache, token sampling."""
