"""A client of the Open Reward Standard, which OpenReward's environments speak, and such an environment as a class of ours."""

from .client import OpenReward, Session, SessionLostError
from .environment import environment, openreward_reward, rows

__all__ = ["OpenReward", "Session", "SessionLostError", "environment", "openreward_reward", "rows"]
