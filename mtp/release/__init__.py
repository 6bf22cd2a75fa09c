"""A Hub-ready folder from a grafted checkpoint and its measurements."""
