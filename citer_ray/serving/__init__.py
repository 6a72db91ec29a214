"""Serving without Ray: OpenAI's API over routed decoding, as an ASGI application and plain async generators.

`on_ray/serve_*.py` puts it behind Ray Serve; tests run it in one process.
"""
