"""The fault bench: everything around metis breaks, and nothing is lost."""
