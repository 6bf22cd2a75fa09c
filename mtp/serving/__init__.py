"""Serving in vLLM: the routing plugin, and measurements of a running engine."""
