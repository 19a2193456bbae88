"""A Trio stream that can also be used on the spot, without a turn for others."""

from __future__ import annotations

from abc import abstractmethod

import trio


class PromptStream(trio.abc.Stream):
    """What `metis.rpc.session` likes its streams to be; it takes others as well."""

    @abstractmethod
    def send_some(self, data: bytes | memoryview) -> int:
        """Send what can be sent now; how many bytes, which may be none.

        Not while a `send_all` is under way: the two would mix.

        Raises:
          ClosedResourceError: this end is closed.
          BrokenResourceError: the other end is.
        """

    def receive_now(self, max_bytes: int) -> bytes | None:
        """Take what is there already; None when that cannot be told without waiting.

        Not while another task receives.

        Raises:
          ClosedResourceError: this end is closed.
          BrokenResourceError: the other end is.
        """
        del max_bytes
        return None

    @abstractmethod
    def close(self) -> None:
        """As `aclose`, at once."""
