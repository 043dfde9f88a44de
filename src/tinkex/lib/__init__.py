"""The official client's private rooms, as far as programs are known to import from them."""
