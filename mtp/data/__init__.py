"""Traces and code in, token ids with loss masks out."""
