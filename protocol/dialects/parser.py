"""Reads one sampled turn: message text, reasoning, calls in Hermes form, custom calls. It never raises.

It knows marks (control tokens with a meaning), JSON's outline and the names of the tools; nothing of
templates or items.

Strategy: a state machine. `_meaning` lists which mark means something in which state; in every other case a
control token is spelled out where it stands (inside free text it is content), or ends a call that cannot go
on with it. Nothing that was sampled is lost: what looked like a call and was not is given as message text,
mark included.

    MESSAGE ──<think>──▶ REASONING ──</think>──▶ MESSAGE
    MESSAGE ──<tool_call>──▶ HEADER ──"arguments":──▶ ARGUMENTS ──}──▶ TAIL ──</tool_call>──▶ MESSAGE
    MESSAGE ──<custom_call>──▶ NAME ──newline──▶ INPUT ──</custom_call>──▶ MESSAGE

The template writes one newline on each side of a mark; it belongs to neither text, so a text's last newline
waits until it is known what follows. A message or reasoning of white space alone is none.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from protocol.dialects.base import (
    CallDelta,
    CallEnded,
    CallStarted,
    Malformed,
    Parsed,
    ReasoningDelta,
    TextDelta,
)
from protocol.dialects.scanners import ObjectScanner, Trimmed, is_json_object
from protocol.dialects.tokens import Detokenizer, Tokens

MAX_NAME = 128  # characters of a tool's name; a longer one is no name
MAX_HEADER = (
    256  # characters before the arguments of a call that is streamed: name, JSON's marks, white space
)

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids of the control tokens that mean something inside a turn."""

    reasoning_open: int
    reasoning_close: int
    call_open: int
    call_close: int
    custom_open: int
    custom_close: int
    stops: tuple[int, ...]


class State(enum.Enum):
    """Where in a turn the parser is."""

    MESSAGE = enum.auto()
    REASONING = enum.auto()
    HEADER = enum.auto()  # in a call, before its arguments
    ARGUMENTS = enum.auto()
    TAIL = enum.auto()  # in a call, after its arguments
    NAME = enum.auto()  # in a custom call, before its input
    INPUT = enum.auto()
    OVER = enum.auto()


class _WholeCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_WHOLE_CALL = msgspec.json.Decoder(_WholeCall)


class TurnParser:
    """The parser of one turn. `functions` and `customs`: what starts for each name that may be called."""

    def __init__(
        self,
        tokens: Tokens,
        marks: Marks,
        functions: Mapping[str, CallStarted],
        customs: Mapping[str, CallStarted],
    ) -> None:
        self._detokenizer = Detokenizer(tokens)
        self._spelling = tokens.spelling
        self._marks = marks
        self._functions = functions
        self._customs = customs
        self._state = State.MESSAGE
        self._out: list[Parsed] = []
        self._prose = Trimmed()  # the message or reasoning; stays while a call has not started for certain
        self._refused_close: int | None = None  # closes a call that is being given as text: content, once
        self._raw: list[str] = []  # of the call that is open, from its mark to its arguments or input
        self._raw_length = 0
        self._scanner = ObjectScanner()
        self._arguments: list[str] = []
        self._input = Trimmed(keep_blank=True)
        self._tail = ""
        self._readers: dict[State, Callable[[str], None]] = {
            State.MESSAGE: self._read_message,
            State.REASONING: self._read_reasoning,
            State.HEADER: self._read_header,
            State.ARGUMENTS: self._read_arguments,
            State.TAIL: self._read_tail,
            State.NAME: self._read_name,
            State.INPUT: self._read_input,
        }
        self._meaning: dict[tuple[State, int], Callable[[], None]] = {
            (State.MESSAGE, marks.reasoning_open): self._open_reasoning,
            (State.MESSAGE, marks.call_open): self._open_call,
            (State.MESSAGE, marks.custom_open): self._open_custom,
            (State.REASONING, marks.reasoning_close): self._close_reasoning,
            (State.HEADER, marks.call_close): self._close_whole_call,
            (State.ARGUMENTS, marks.call_close): self._break_call,
            (State.TAIL, marks.call_close): self._close_call,
            (State.INPUT, marks.custom_close): self._close_call,
        }

    def feed(self, tokens: Sequence[int]) -> list[Parsed]:
        """What these further tokens make known. Nothing is read after a stop token."""
        plain: list[int] = []
        for token in tokens:
            if token not in self._spelling:
                plain.append(token)
                continue
            self._read(self._detokenizer.feed(plain) + self._detokenizer.flush())
            plain.clear()
            self._control(token)
        if plain:
            self._read(self._detokenizer.feed(plain))
        return self._taken()

    def finish(self) -> list[Parsed]:
        """The turn is over: what was still waiting. An open call ends incomplete."""
        self._read(self._detokenizer.flush())
        self._end()
        return self._taken()

    def _taken(self) -> list[Parsed]:
        out, self._out = self._out, []
        return out

    # ---- control tokens

    def _control(self, token: int) -> None:
        if self._state is State.OVER:
            return
        if token in self._marks.stops:
            if self._state is State.TAIL:
                self._close_call()
            self._end()
        elif act := self._meaning.get((self._state, token)):
            act()
        elif self._state in (State.HEADER, State.NAME):
            self._refuse("a control token in the head of a call")
            self._control(token)
        elif self._state is State.ARGUMENTS and not self._scanner.in_string:
            self._break_call()
            self._control(token)
        elif self._state is State.TAIL:
            self._close_call()
            self._control(token)
        else:
            if token == self._refused_close:
                self._refused_close = None
            else:
                self._out.append(Malformed(f"{self._spelling[token]} in {self._state.name.lower()}"))
            self._read(self._spelling[token])

    def _end(self) -> None:
        match self._state:
            case State.HEADER | State.NAME:
                self._refuse("the turn ended in the head of a call")
                self._say(TextDelta, self._prose.end())
            case State.MESSAGE:
                self._say(TextDelta, self._prose.end())
            case State.REASONING:
                self._say(ReasoningDelta, self._prose.end())
            case State.INPUT:
                self._say(CallDelta, self._input.end())
                self._break_call()
            case State.ARGUMENTS | State.TAIL:
                self._break_call()
        self._state = State.OVER

    # ---- text

    def _read(self, text: str) -> None:
        if text and self._state is not State.OVER:
            self._readers[self._state](text)

    def _say(self, kind: type[TextDelta] | type[ReasoningDelta] | type[CallDelta], text: str) -> None:
        if text:
            self._out.append(kind(text))

    def _read_message(self, text: str) -> None:
        self._say(TextDelta, self._prose.feed(text))

    def _read_reasoning(self, text: str) -> None:
        self._say(ReasoningDelta, self._prose.feed(text))

    def _open_reasoning(self) -> None:
        self._prose = Trimmed(after_mark=True)
        self._state = State.REASONING

    def _close_reasoning(self) -> None:
        self._prose = Trimmed(after_mark=True)
        self._state = State.MESSAGE

    # ---- calls

    def _open_call(self) -> None:
        self._open_head(State.HEADER, self._marks.call_open, self._marks.call_close)

    def _open_custom(self) -> None:
        self._open_head(State.NAME, self._marks.custom_open, self._marks.custom_close)

    def _open_head(self, state: State, opening: int, closing: int) -> None:
        self._state = state
        self._raw = [self._spelling[opening]]
        self._raw_length = 0
        self._refused_close = closing

    def _read_header(self, text: str) -> None:
        """Until the arguments begin. Members in another order than usual are kept until the call closes."""
        is_unusual = self._raw_length > MAX_HEADER
        self._raw.append(text)
        self._raw_length += len(text)
        if is_unusual:
            return
        raw = "".join(self._raw[1:])
        if header := _HEADER.match(raw, 0, MAX_HEADER):
            if started := self._functions.get(header[1]):
                self._start(started, State.ARGUMENTS)
                self._scanner = ObjectScanner()
                self._arguments = []
                self._read_arguments(raw[header.end() :])
            else:
                self._refuse(f"no tool is called {header[1]!r}")
        elif raw.lstrip()[:1] not in ("", "{"):
            self._refuse("a call that is not a JSON object")

    def _read_arguments(self, text: str) -> None:
        end = self._scanner.feed(text)
        own = text[:end]
        self._arguments.append(own)
        self._say(CallDelta, own)
        if end is not None:
            self._state = State.TAIL
            self._tail = ""
            self._read(text[end:])

    def _read_tail(self, text: str) -> None:
        tail = self._tail + text
        self._tail = tail.strip()
        if surplus := tail.lstrip().removeprefix("}").lstrip():
            self._close_call()
            self._out.append(Malformed("text after a call's arguments"))
            self._refused_close = self._marks.call_close
            self._read(surplus)

    def _close_whole_call(self) -> None:
        """A call whose arguments were not streamed: its members came in another order, or it is none."""
        try:
            call = _WHOLE_CALL.decode("".join(self._raw[1:]))
            arguments = bytes(call.arguments).decode()
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = ""
        if is_json_object(arguments) and (started := self._functions.get(call.name)):
            self._start(started, State.TAIL)
            self._arguments = [arguments]
            self._say(CallDelta, arguments)
            self._close_call()
        else:
            self._refuse("a call without a known name and an object of arguments")
            self._control(self._marks.call_close)

    def _read_name(self, text: str) -> None:
        self._raw.append(text)
        self._raw_length += len(text)
        name, newline, rest = "".join(self._raw[1:]).partition("\n")
        if newline and (started := self._customs.get(name)):
            self._start(started, State.INPUT)
            self._input = Trimmed(keep_blank=True)
            self._read(rest)
        elif newline or self._raw_length > MAX_NAME:
            self._refuse(f"no custom tool is called {name[:MAX_NAME]!r}")

    def _read_input(self, text: str) -> None:
        self._say(CallDelta, self._input.feed(text))

    def _start(self, started: CallStarted, state: State) -> None:
        """It is a call indeed; the newline that waited before its mark was the template's."""
        self._refused_close = None
        self._out.append(started)
        self._state = state

    def _close_call(self) -> None:
        self._leave_call(complete=self._state is State.INPUT or is_json_object("".join(self._arguments)))

    def _break_call(self) -> None:
        self._leave_call(complete=False)

    def _leave_call(self, *, complete: bool) -> None:
        self._out.append(CallEnded(complete))
        self._prose = Trimmed(after_mark=True)
        self._state = State.MESSAGE

    def _refuse(self, why: str) -> None:
        """It is no call: all of it is message text."""
        self._out.append(Malformed(why))
        self._state = State.MESSAGE
        self._read("".join(self._raw))
