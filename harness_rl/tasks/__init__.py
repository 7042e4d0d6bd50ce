"""Tasks: what a folder holds (`load`), whether the sandbox can run it (`lint`), whether it is sound (`check`), and the quickstart's own."""
