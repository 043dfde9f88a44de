"""Images: their size and tokens from the header, and their patches, decoded in a child process."""
