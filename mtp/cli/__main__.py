"""`python -m mtp.cli`."""

from mtp.cli import main

main()
