"""Build a prompt: count the inputs, share the window, and compose the token ids with their ledger."""

from localrag.prompt.compose import Prompt, compose
from localrag.prompt.layout import ANSWER_BASIS, CITE, PLAIN, PromptInputs
from localrag.prompt.measure import Demand, alike, measure
from localrag.prompt.packing import Shortening

__all__ = ["ANSWER_BASIS", "CITE", "PLAIN", "Demand", "Prompt", "PromptInputs", "Shortening", "alike", "compose", "measure"]
