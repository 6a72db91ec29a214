"""citer_ray: token-level routing between a small and a large language model, on Ray.

The package's rooms follow the data: examples -> engines -> labels -> router -> decoding -> evaluation.
Importing it has no effects and loads neither Ray nor vLLM nor MLflow.
"""

__version__ = "0.1.0"
