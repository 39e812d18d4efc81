"""The vocabulary of the system: frozen values, closed unions, ports. Standard library only."""
