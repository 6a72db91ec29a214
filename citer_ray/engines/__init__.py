"""Implementations of the `Engine` protocol. Importing this package loads no model library."""
