"""tinkex: the Tinker training API as software you own."""
