"""Local sandboxes: a namespace sandbox that is a Harbor environment, and what it is built from.

Nothing is imported here: the supervisor (supervisor.py) starts from this package without the site packages, once per session, and its
start-up time is part of every rollout."""
