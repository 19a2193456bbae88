"""Scenarios on real runtimes, in namespaces of their own."""
