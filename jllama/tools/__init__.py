"""Tool calls: what a model may call, how the families of models write calls, and calls found in an answer."""

from jllama.tools.calls import CallParser, Found, ToolCall, finish_reason, parse
from jllama.tools.families import FAMILIES, Family, call_format, family_of
from jllama.tools.request import Tools, to_tools, with_arguments
from jllama.tools.turn import ToolsError, Turn, turn

__all__ = [
    "FAMILIES",
    "CallParser",
    "Family",
    "Found",
    "ToolCall",
    "Tools",
    "ToolsError",
    "Turn",
    "call_format",
    "family_of",
    "finish_reason",
    "parse",
    "to_tools",
    "turn",
    "with_arguments",
]
