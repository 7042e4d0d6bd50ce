"""What goes over the wire, in the echo Space's names."""

from openenv.core.env_server import Action, Observation


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str = ""
    message_length: int = 0
