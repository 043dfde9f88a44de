"""Private modules of the official client that programs are known to import."""
