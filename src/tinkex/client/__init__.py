"""The client: everything a program needs to train and sample on any Tinker service."""
