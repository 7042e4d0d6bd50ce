"""The capture proxy beside OpenEnv's capture server and a direct connection, on one cheap engine. `python -m harness_rl.bench.capture`."""
