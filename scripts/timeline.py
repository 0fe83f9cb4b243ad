"""How an agent's run looks on a terminal: a line for each leg, its calls below it, the answer, the work.

It knows an `AgentResult` and a console, and nothing of sockets. Strategy: everything is drawn from the result
alone, so a test needs no run. What is finished is printed once and scrolls away; only the leg that goes on is
drawn again and again, and only on a terminal that can. Text of models and tools is shown, never obeyed:
`printable` makes control characters visible, and no markup is parsed.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable
from itertools import zip_longest
from types import TracebackType
from typing import Any

import trio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from protocol.client.agent import AgentResult, Call, Leg, Tokens

FRAME = 0.08  # s between two drawings of the live leg
PLAIN_WIDTH = 100  # characters of a line where there is no terminal
ARGUMENTS_WIDTH = 44  # characters of a call's arguments
LIVE_TEXT_LINES = 6  # of streaming text; the rest is seen when the leg is finished
INDENT = 6
CALL_WIDTH = 52  # characters of a call's line before its time
COUNT_NAME, COUNT = 24, 9  # characters of a count in the work
LONGEST_TIME = 20  # characters of the longest bar there
BESIDE_THE_BAR = 69  # characters of a leg's line without its bar
NARROWEST_BAR, WIDEST_BAR = 8, 28

KEPT, PREFILLED, SAMPLED = "blue", "yellow", "green"
COLUMNS = (("kept", 8, KEPT), ("prefilled", 11, PREFILLED), ("sampled", 9, SAMPLED))
TIMES = (("first token", 13), ("tools", 10), ("waiting", 10))

COUNTS = {
    "legs": "legs",
    "pre_passes": "passes before inference",
    "post_passes": "passes after inference",
    "bytes_in": "bytes in",
    "items_validated": "items validated",
    "characters_rendered": "characters rendered",
    "characters_tokenised": "characters tokenised",
    "tokens_prefilled": "tokens prefilled",
    "tokens_reused": "tokens kept in KV",
    "tokens_sampled": "tokens sampled",
    "malformed_calls": "malformed calls",
}


def printable(text: str) -> str:
    """`text` with every character that could steer a terminal or reorder a line written as an escape.

    Newlines and tabs stay. Joiners inside emoji and scripts stay too: they steer nothing.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character in "\n\t\u200c\u200d" or unicodedata.category(character) not in (
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    ):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def one_line(text: str, width: int) -> str:
    """`text`, printable, in one line of at most `width` characters."""
    line = " ".join(printable(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 3] + "..."


def duration(seconds: float | None) -> str:
    """Seconds or milliseconds, so that two figures or more say something; nothing for None."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def arguments(text: str) -> str:
    """A call's arguments as `name=value ...`; as they are, where they are no JSON object (yet)."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(values, dict):
        return text
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


class Timeline:
    """Draws a result while it fills. `watch` prints, and inside `async with` a task may `draw`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._can_redraw = console.is_terminal and not console.is_dumb_terminal
        self._width = console.width if self._can_redraw else PLAIN_WIDTH
        self._colour = console.color_system is not None
        unicode = console.encoding.lower().startswith("utf")
        self._stroke, self._dot = ("━", "·") if unicode else ("=", "-")
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawing = trio.CancelScope()
        self._printed = 0
        self._result = AgentResult()

    async def __aenter__(self) -> Timeline:
        if self._can_redraw:
            self._live.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawing.cancel()
        self._live.stop()

    def heading(self, title: str, about: str, task: str) -> None:
        """The lines above the first leg."""
        self._print(Text.assemble((title, "bold"), ("  " + one_line(about, 80), "dim")))
        self._print(Text("> ", "dim").append(printable(task.strip()), "italic"))
        columns = Text(" leg  " + " " * self._bar_width)
        for name, width, style in COLUMNS:
            columns.append(name.rjust(width), style)
        for name, width in TIMES:
            columns.append(name.rjust(width), "dim")
        self._print(Text(), columns)

    def watch(self, result: AgentResult) -> None:
        """Prints the legs that have been finished since the last time."""
        self._result = result
        over = result.status != "in_progress"
        for leg in result.legs[self._printed :]:
            if leg.answered is None and not over:
                break
            self._print(*self.leg(leg, with_text=leg is not result.legs[-1]))
            self._printed += 1

    async def draw(self) -> None:
        """Draws the leg that goes on, until `async with` ends. Returns at once on a dumb terminal."""
        with self._drawing:
            while self._can_redraw:
                lines = [line for leg in self._result.legs[self._printed :] for line in self.leg(leg)]
                self._live.update(Text("\n").join(lines), refresh=True)
                await trio.sleep(FRAME)

    def conclusion(self, result: AgentResult, seconds: float) -> None:
        """The answer, the work and a closing line."""
        if result.answer:
            self._print(Text(), *self._indented(result.answer, "bold"))
        if result.work:
            self._print(Text(), *self.work(result.work))
        good = result.status == "completed"
        line = Text(result.status, "bold green" if good else "bold red")
        if result.reason:
            line.append(f" ({one_line(result.reason, 200)})")
        for count, what in (
            (len(result.legs), "leg"),
            (len(result.calls), "call"),
            (result.tokens.sampled, "token"),
        ):
            line.append(f" {self._dot} {count:,} {what}{'s' * (count != 1)}", "dim")
        self._print(Text(), line.append(f" {self._dot} {duration(seconds)}", "dim"))

    def leg(self, leg: Leg, *, with_text: bool = True) -> list[Text]:
        """A leg's line, its text, its calls. The last leg's text is the answer, which has its own place."""
        text = self._indented(leg.text, "") if with_text else []
        if leg.tokens is None:
            text = text[-LIVE_TEXT_LINES:]
        return [self._leg_line(leg), *text, *map(self._call_line, leg.calls)]

    def work(self, work: dict[str, Any]) -> list[Text]:
        """The server's accounting: what was done how often, and beside it how long each stage took."""
        counts = [(name, work.get(field, 0)) for field, name in COUNTS.items()]
        for name, characters in work.get("characters_classified", {}).items():
            counts.append((f"characters seen by {one_line(name, 20)}", characters))
        left = [f"{name:<{COUNT_NAME}}{count:>{COUNT},}" for name, count in counts if count]
        times = [(name, float(ms)) for name, ms in work.get("times_ms", {}).items() if ms]
        longest = max((ms for _, ms in times), default=1.0)
        lines = [Text(" " * INDENT + "work of the whole run".ljust(COUNT_NAME + COUNT + 4) + "time", "bold")]
        for count_text, time in zip_longest(left, times, fillvalue=None):
            line = Text(" " * INDENT + (count_text or "").ljust(COUNT_NAME + COUNT + 4))
            if time:
                name, ms = time
                line.append(f"{one_line(name, 12).replace('_', ' '):<12}{duration(ms / 1e3):>9}  ")
                line.append(self._stroke * math.ceil(LONGEST_TIME * ms / longest), "magenta")
            lines.append(line)
        return lines

    @property
    def _bar_width(self) -> int:
        room = min(WIDEST_BAR, self._width - BESIDE_THE_BAR)
        return room if room >= NARROWEST_BAR else 0

    def _leg_line(self, leg: Leg) -> Text:
        line = Text(f"{leg.number:>4}  ")
        if leg.tokens is None:
            doing = "sampling" if leg.first_token else "waiting for the first token"
            return line.append(f"{doing}, {trio.current_time() - leg.asked:.1f} s", "dim")
        line.append(self._bar(leg.tokens))
        amounts = (leg.tokens.kept, leg.tokens.prefilled, leg.tokens.sampled)
        for amount, (_, width, style) in zip(amounts, COLUMNS, strict=True):
            line.append(f"{amount:,}".rjust(width), style)
        tools = [call.seconds for call in leg.calls if call.seconds is not None]
        seconds = (leg.time_to_first_token, max(tools, default=None), leg.waiting)
        for one, (_, width) in zip(seconds, TIMES, strict=True):
            line.append(duration(one).rjust(width))
        return line

    def _bar(self, tokens: Tokens) -> Text:
        """The context at the end of a leg, by where it came from. What is there at all gets a cell."""
        width = self._bar_width
        parts = ((tokens.kept, KEPT, "-"), (tokens.prefilled, PREFILLED, "+"), (tokens.sampled, SAMPLED, "#"))
        total = sum(amount for amount, _, _ in parts) or 1
        cells = [max(amount > 0, round(width * amount / total)) if width else 0 for amount, _, _ in parts]
        cells[cells.index(max(cells))] += width - sum(cells)
        bar = Text()
        for count, (_, style, letter) in zip(cells, parts, strict=True):
            bar.append((self._stroke if self._colour else letter) * count, style)
        return bar

    def _call_line(self, call: Call) -> Text:
        line = Text(" " * INDENT).append(one_line(call.name, 40), "cyan")
        line.append(" " + one_line(arguments(call.arguments), ARGUMENTS_WIDTH))
        if call.began is None:
            return line
        line.pad_right(max(0, CALL_WIDTH - line.cell_len))
        line.append(duration(call.seconds).rjust(10) if call.seconds is not None else "   running", "dim")
        if call.output is not None:
            room = max(12, self._width - line.cell_len - 3)
            style = "red" if call.output.startswith("error") else "dim"
            line.append("  " + one_line(call.output, room), style)
        return line

    def _indented(self, text: str, style: str) -> list[Text]:
        shown = Text(printable(text.strip()).expandtabs(4), style)
        lines: Iterable[Text] = shown.wrap(self._console, max(20, self._width - INDENT)) if shown else ()
        return [Text(" " * INDENT).append_text(line) for line in lines]

    def _print(self, *lines: Text) -> None:
        """Prints above the leg that goes on, and without it: what is printed may be that leg."""
        self._live.update(Text())
        for line in lines:
            line.rstrip()
        self._console.print(Text("\n").join(lines), soft_wrap=not self._can_redraw)
