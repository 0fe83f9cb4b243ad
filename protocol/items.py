"""Output items as they grow: what a parser read becomes items, and the events that show them.

It knows the order of events inside an item and the ids of items, nothing of runs or tokens. Ids are made from
the run's id and the item's index, so a leg whose tokens are read a second time (after a restart) makes the
same items again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import UNSET

from protocol import wire
from protocol.dialects.base import (
    CallDelta,
    CallEnded,
    CallStarted,
    Parsed,
    ReasoningDelta,
    TextDelta,
)


def as_item(output: wire.OutputItem) -> wire.Item:
    """An output item as an item of a conversation's history."""
    match output:
        case wire.OutputMessage(content=parts):
            content = [wire.ContentPart("output_text", text=part.text) for part in parts]
            return wire.Message("assistant", content, id=output.id, status=output.status)
        case wire.OutputReasoning(content=texts):
            thoughts = [wire.ContentPart("reasoning_text", text=part.text) for part in texts]
            return wire.Reasoning(content=thoughts, id=output.id, status=output.status)
        case wire.OutputFunctionCall() | wire.OutputCustomCall():
            namespace = None if output.namespace is UNSET else output.namespace
            kind = wire.FunctionCall if isinstance(output, wire.OutputFunctionCall) else wire.CustomToolCall
            said = output.arguments if isinstance(output, wire.OutputFunctionCall) else output.input
            return kind(
                output.call_id, output.name, said, id=output.id, status=output.status, namespace=namespace
            )


class ItemWriter:
    """Writes the items of one leg. `emit` gets each event as it arises; `items` are those begun so far, the
    last may be open.
    """

    def __init__(self, run_id: str, first_index: int, emit: Callable[[wire.ServerEvent], None]) -> None:
        self.items: list[wire.OutputItem] = []
        self._suffix = run_id.removeprefix("resp_")
        self._first_index = first_index
        self._emit = emit
        self._open: wire.OutputItem | None = None
        self._text: list[str] = []  # of the open item

    @property
    def calls(self) -> list[wire.OutputCall]:
        """The calls that are complete, in order: what the client will owe results for."""
        return [
            item for item in self.items if isinstance(item, wire.OutputCall) and item.status == "completed"
        ]

    def write(self, parsed: Parsed) -> None:
        """Take one more thing that the parser read."""
        match parsed:
            case TextDelta(text):
                if not isinstance(self._open, wire.OutputMessage):
                    self._begin(wire.OutputMessage(self._id("msg"), "in_progress", []))
                self._grow(text)
            case ReasoningDelta(text):
                if not isinstance(self._open, wire.OutputReasoning):
                    self._begin(wire.OutputReasoning(self._id("rs"), "in_progress", []))
                self._grow(text)
            case CallStarted(name, namespace, custom):
                kind = wire.OutputCustomCall if custom else wire.OutputFunctionCall
                item_id, call_id = self._id("ctc" if custom else "fc"), self._id("call")
                self._begin(kind(item_id, "in_progress", call_id, name, "", namespace or UNSET))
            case CallDelta(text):
                self._grow(text)
            case CallEnded(complete):
                self.close(complete=complete)

    def close(self, *, complete: bool = True) -> None:
        """End the open item, if there is one. An item that was cut is `incomplete`."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(self._text)
        self._text.clear()
        item.status = "completed" if complete else "incomplete"
        at, index = item.id, self._first_index + len(self.items) - 1
        match item:
            case wire.OutputMessage():
                item.content = [wire.OutputText(text)]
                self._emit(wire.TextDone(item_id=at, output_index=index, text=text))
                self._emit(self._part_done(item.content[0]))
            case wire.OutputReasoning():
                item.content = [wire.ReasoningText(text)]
                self._emit(wire.ReasoningDone(item_id=at, output_index=index, text=text))
                self._emit(self._part_done(item.content[0]))
            case wire.OutputFunctionCall():
                item.arguments = text
                self._emit(wire.ArgumentsDone(item_id=at, output_index=index, name=item.name, arguments=text))
            case wire.OutputCustomCall():
                item.input = text
                self._emit(wire.CustomInputDone(item_id=at, output_index=index, input=text))
        self._emit(wire.ItemDone(output_index=index, item=item))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Write items without emitting events: what was shown already is only being read again."""
        emit, self._emit = self._emit, lambda event: None
        try:
            yield
        finally:
            self._emit = emit

    def _part_done(self, part: wire.OutputText | wire.ReasoningText) -> wire.PartDone:
        item, index = self.items[-1], self._first_index + len(self.items) - 1
        return wire.PartDone(item_id=item.id, output_index=index, content_index=0, part=part)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{self._first_index + len(self.items)}"

    def _begin(self, item: wire.OutputItem) -> None:
        # The id was made before the item before it was closed: closing adds no item, so the index stands.
        self.close()
        self.items.append(item)
        self._open = item
        index = self._first_index + len(self.items) - 1
        self._emit(wire.ItemAdded(output_index=index, item=item))
        if isinstance(item, wire.OutputMessage):
            part = wire.OutputText("")
            self._emit(wire.PartAdded(item_id=item.id, output_index=index, content_index=0, part=part))
        elif isinstance(item, wire.OutputReasoning):
            empty = wire.ReasoningText("")
            self._emit(wire.PartAdded(item_id=item.id, output_index=index, content_index=0, part=empty))

    def _grow(self, text: str) -> None:
        item = self._open
        assert item is not None
        self._text.append(text)
        index = self._first_index + len(self.items) - 1
        match item:
            case wire.OutputMessage():
                self._emit(wire.TextDelta(item_id=item.id, output_index=index, delta=text))
            case wire.OutputReasoning():
                self._emit(wire.ReasoningDelta(item_id=item.id, output_index=index, delta=text))
            case wire.OutputFunctionCall():
                self._emit(wire.ArgumentsDelta(item_id=item.id, output_index=index, delta=text))
            case wire.OutputCustomCall():
                self._emit(wire.CustomInputDelta(item_id=item.id, output_index=index, delta=text))
