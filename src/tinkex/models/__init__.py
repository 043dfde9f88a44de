"""Base models: names, files and tokenizers. Does not use torch."""
