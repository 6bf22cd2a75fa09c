"""mtp-graft: multi-layer MTP heads for the model you serve."""

__version__ = "0.1.0"
