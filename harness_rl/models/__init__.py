"""Models by name, folder or hub id: `fetch` brings one here, `resolve_model` says where it is."""

from harness_rl.models.packaged import CATALOG, fetch
from harness_rl.models.resolve import check_model_folder, resolve_model

__all__ = ["CATALOG", "check_model_folder", "fetch", "resolve_model"]
