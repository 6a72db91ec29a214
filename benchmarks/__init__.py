"""Measurements of this project against plain `transformers` loops; `python -m benchmarks` runs them all."""
