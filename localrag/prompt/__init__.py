"""What is sent, in which order, and how much of each: an Offer is measured, its budget shared, and the Prompt composed."""

from localrag.prompt.compose import Prompt, compose
from localrag.prompt.measure import Wants, measure
from localrag.prompt.offer import ANSWER_BASIS, Offer
from localrag.prompt.pack import Shortening

__all__ = ["ANSWER_BASIS", "Offer", "Prompt", "Shortening", "Wants", "compose", "measure"]
