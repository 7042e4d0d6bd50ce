"""What the rest of the product knows about a harness. Invariant: an agent is the published program, unmodified; all that is ours is how
it is installed (a layer), started (a command line) and told where its model is (agent.env)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness_rl.sandboxes.layers import LayerRecipe


@dataclass(frozen=True)
class AgentSpec:
    name: str
    version: str
    import_path: str
    """Harbor's `agent.import_path`."""
    variants: tuple[str, ...]
    """Values of the agent's `model_class`; the first is the default."""
    recipe: Callable[[str], LayerRecipe]
    """The layer of a variant."""

    def layers(self, model_class: str | None = None) -> list[LayerRecipe]:
        """The layers that a session needs, the topmost first. Raises ValueError for an unknown variant."""
        variant = model_class or self.variants[0]
        if variant not in self.variants:
            raise ValueError(f"{self.name} has no model_class {variant!r} (have {', '.join(self.variants)})")
        return [self.recipe(variant)]
