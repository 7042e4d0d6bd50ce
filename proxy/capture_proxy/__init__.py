"""Capture proxy: records, token by token, what an unmodified agent asked the engine and what the engine sampled."""
