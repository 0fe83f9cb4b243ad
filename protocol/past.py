"""What an ended Response leaves for the one that continues it, and what a connection remembers of its
Responses.

It knows states and conversations, no sockets. A past is the state of a run that has ended, which does not
change any more, and perhaps its conversation, with the KV. `ConnectionMemory` keeps pasts as long as a socket
lives; the `Shelf` bounds how many of them have their KV.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from protocol.conversation import Conversation
from protocol.errors import RequestError
from protocol.state import RunState
from protocol.wire import Create

EARLIER_RESPONSES = 32  # that a connection remembers beside each lane's latest: forks go back a few turns


class Past:
    """One ended Response. Without a conversation its KV is not kept: the ledger is prefilled again."""

    def __init__(self, state: RunState, conversation: Conversation | None = None) -> None:
        self.state = state
        self.conversation = conversation

    def begins_with(self, opening: list[int]) -> bool:
        """Whether its ledger begins with these instructions and tools: then it is continued as it is."""
        ledger = self.state.ledger
        return len(ledger) > 0 and ledger.tokens[: self.state.opening] == opening

    def fork(self) -> Past:
        """The same past for one more successor, sharing the KV."""
        return Past(self.state, self.conversation and self.conversation.succeed(fork=True))

    def release(self) -> None:
        """Give the KV back. Idempotent."""
        if self.conversation is not None:
            self.conversation.release()
            self.conversation = None


NOTHING = Past(
    RunState(id="", owner="", lifecycle="", prototype=False, created_at=0, request=Create(), items=[])
)
"""What a conversation that begins now continues."""

FindPast: TypeAlias = Callable[[], Awaitable[Past]]
"""Finds what a request continues, when its turn has come. Raises RequestError."""


async def find_nothing() -> Past:
    """For a request that continues nothing."""
    return NOTHING


def not_found(response_id: str) -> RequestError:
    """There is no such Response, or not for this caller."""
    return RequestError(
        f"Previous response with id '{response_id[:256]}' not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


class Shelf:
    """Conversations that wait with their KV for a next turn. Of more than `room`, those that waited longest
    give it back: their next turn costs a prefill.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: OrderedDict[Conversation, None] = OrderedDict()

    def put(self, conversation: Conversation) -> None:
        """This one waits from now on."""
        self._waiting[conversation] = None
        for each in [each for each in self._waiting if not each.has_kv]:
            del self._waiting[each]
        while len(self._waiting) > self._room:
            self._waiting.popitem(last=False)[0].release()

    def statistics(self) -> dict[str, float]:
        """How many wait, and how many could."""
        return {"waiting": sum(each.has_kv for each in self._waiting), "room": self._room}


class ConnectionMemory:
    """The pasts of one connection, by lane: KV for the latest Response of every lane, of earlier ones the
    state.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._latest: dict[object, str] = {}  # lane to id
        self._pasts: OrderedDict[str, Past] = OrderedDict()  # oldest first

    def keep(self, lane: object, past: Past) -> None:
        """The lane's latest Response is this one."""
        if earlier := self._pasts.get(self._latest.get(lane, "")):
            earlier.release()
        self._latest[lane] = past.state.id
        self._pasts[past.state.id] = past
        if past.conversation is not None:
            self._shelf.put(past.conversation)
        latest = set(self._latest.values())
        earlier_ids = [each for each in self._pasts if each not in latest]
        for response_id in earlier_ids[: max(0, len(earlier_ids) - EARLIER_RESPONSES)]:
            self._pasts.pop(response_id).release()

    def take(self, lane: object, response_id: str) -> Past | None:
        """For a successor on this lane: with the KV itself if it continues the lane's latest, else with a
        fork of it.
        """
        past = self._pasts.get(response_id)
        if past is None:
            return None
        if self._latest.get(lane) != response_id:
            return past.fork()
        taken = Past(past.state, past.conversation)
        past.conversation = None
        return taken

    def pin(self, lane: object, response_id: str) -> Past | None:
        """For a successor that waits: what another lane made is forked now, for that lane may go on
        meanwhile.
        """
        return None if self._latest.get(lane) == response_id else self.take(lane, response_id)

    def evict(self, lane: object, response_id: str) -> None:
        """This lane's continuation of the Response failed: it is gone. What other lanes made stays."""
        if self._latest.get(lane) == response_id:
            del self._latest[lane]
            self._pasts.pop(response_id).release()

    def release(self) -> None:
        """The connection is gone."""
        for past in self._pasts.values():
            past.release()
        self._pasts.clear()
        self._latest.clear()
