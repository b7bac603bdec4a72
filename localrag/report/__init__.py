"""What the asks of a journal show together: figures, and a page on which their windows are drawn."""

from localrag.report.figures import Chunk, Cut, Item, Report, SessionFigures, Trend, report
from localrag.report.page import MARK, page, when

__all__ = ["MARK", "Chunk", "Cut", "Item", "Report", "SessionFigures", "Trend", "page", "report", "when"]
