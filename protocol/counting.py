"""How many tokens a request comes to, without making a Response of it. It knows a model and what is
continued, no runs and no engine.
"""

from __future__ import annotations

from protocol import wire
from protocol.appended import check_history
from protocol.filters import Filters
from protocol.intake import Intake
from protocol.models import Model
from protocol.past import Past
from protocol.work import Work


async def count_input(request: wire.Create, model: Model, past: Past) -> int:
    """The `input_tokens` of the usage that a Response to this request would have.

    Waits only while long texts are tokenised in a thread. Raises RequestError.
    """
    dialect, work = model.dialect, Work()
    positions: list[int] = []
    items = wire.parse_items(request.input, [], positions=positions)
    check_history(items, past.state.items, positions)
    tools = wire.parse_tools(request.tools, []) if request.tool_choice != "none" else []
    intake = Intake(dialect, Filters(), tools, limit=model.max_input)
    opening = await intake.opening(request.instructions, work)
    if past.begins_with(opening):
        ledger = past.state.ledger
        turn_end = dialect.turn_end(ledger.tokens[-1]) if ledger.spans[-1].sampled else []
        before = len(ledger) + len(dialect.tokenize(turn_end))
    else:
        before = len(opening)
        items = [*past.state.items, *items]
    return before + len(await intake.items(items, work, positions=positions)) + len(model.turn_start)
