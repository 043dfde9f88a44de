"""The light half: what a program needs to train and sample on any Tinker service."""
