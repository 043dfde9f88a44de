"""Web and worker processes of several machines on one PostgreSQL database."""
