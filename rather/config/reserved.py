"""Names that a user cannot set. Tokenising children need them, and start without pydantic."""

from __future__ import annotations

RESERVED_IN_TEMPLATES = ("messages", "tools", "add_generation_prompt")  # they come from the rows
