"""Checkpoint surgery: the standard library, numpy, torch and safetensors, nothing else."""
