"""Maintenance of a data folder: cleanup, backup and restore, diagnosis and repair."""
