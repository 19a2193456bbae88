"""The store: the only part of metis that knows SQLite."""
