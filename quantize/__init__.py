"""NVFP4 experts through nvidia-modelopt, imported only when needed."""
