"""The demo model: a small base trained on the spot, and a scripted agent that really works."""
