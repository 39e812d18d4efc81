"""What steps cost and how many remain: learned models behind ports of the core."""
