"""What goes over the wire, in the BrowserGym Space's names."""

from openenv.core.env_server import Action, Observation, State


class BrowserGymAction(Action):
    action_str: str
    """A call, such as `fill('7', 'Ada')` (actions.py)."""


class BrowserGymObservation(Observation):
    text: str = ""
    url: str = ""
    screenshot: list[list[list[int]]] | None = None
    """Rows of pixels; our server takes none."""
    goal: str = ""
    axtree_txt: str = ""
    """The accessibility tree, one element a line: `[7] textbox 'Name'`; what can be acted on has a number, its bid."""
    pruned_html: str = ""
    error: str = ""
    """Why the last action could not be done."""
    last_action_error: bool = False


class BrowserGymState(State):
    benchmark: str = "miniwob"
    task_name: str = ""
    task_id: str | None = None
    goal: str = ""
    current_url: str = ""
    max_steps: int | None = None
    cum_reward: float = 0.0
