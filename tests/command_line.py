"""`mtp` run inside the test's own process."""

import sys

import mtp.cli


def run(*arguments):
    """Run `mtp` in this process; a non-zero exit fails the test."""
    before, sys.argv = sys.argv, ["mtp", *map(str, arguments)]
    try:
        mtp.cli.main()
    except SystemExit as exit_:
        assert not exit_.code, arguments
    finally:
        sys.argv = before
