"""How the programs and servers of one user on one machine find each other. Standard library only."""
