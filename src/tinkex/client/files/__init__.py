"""Checkpoint files: downloads, and uploads to the Hugging Face hub."""
