"""What a reward does wrong."""

from __future__ import annotations


class RewardError(RuntimeError):
    """A reward failed, or gave what cannot be learned from. Nothing of the batch was counted.

    It travels between processes as it is.
    """

    def __init__(
        self, reward: str, reason: str, user_key: str | None = None, place: int | None = None, item: int = -1
    ) -> None:
        """
        Args:
            reward: name of the part of the mix.
            user_key: the first user that it fails for; None: it cannot be said who.
            place: of the first candidate that it fails for, in that user's list; None: it is not one of them.
            item: catalog position of that candidate, -1 where the list has none.
        """
        super().__init__(reward, reason, user_key, place, item)
        self.reward, self.reason = reward, reason
        self.user_key, self.place, self.item = user_key, place, item

    def __str__(self) -> str:
        return f"the reward {self.reward!r}{self._where()}: {self.reason}"

    def _where(self) -> str:
        if self.user_key is None:
            return ""
        if self.place is None:
            return f" of user {self.user_key!r}"
        what = f"item position {self.item}" if self.item >= 0 else "no item"
        return f" of user {self.user_key!r}, {what} at place {self.place} of the list"
