"""LoRA adapters: in memory, on the host, on disk."""
