"""What is sent, in which order, and how much of each: an Offer is measured, its budget shared, and the Prompt composed."""

from localrag.prompt.compose import Prompt, compose
from localrag.prompt.measure import Wants, alike, measure
from localrag.prompt.offer import ANSWER_BASIS, CITE, Offer
from localrag.prompt.pack import Shortening
from localrag.prompt.plain import PLAIN

__all__ = ["ANSWER_BASIS", "CITE", "PLAIN", "Offer", "Prompt", "Shortening", "Wants", "alike", "compose", "measure"]
