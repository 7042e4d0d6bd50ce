"""Proof of the capture on this machine: published agents, unmodified, play a scripted task through the proxy; an oracle reads the trace.

`harness-rl proxy selftest` prints the table; the tests run the same parts. Nothing here takes part in a run.
"""
